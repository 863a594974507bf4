"""Packed documents get the hidden states and gradients of attention and mixers that Transformers gives each alone."""

from copy import deepcopy
from itertools import pairwise

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import AutoModelForCausalLM, PreTrainedConfig
from transformers.models.qwen3_5 import modeling_qwen3_5

from stages.core.errors import ModelError
from stages.data.batch import IGNORED, Batch, Documents
from stages.engines import attention_kernels, state_kernels
from stages.engines.attention import PACKED_DOCUMENTS, hidden_states, packed_attention, register_packed_attention
from stages.engines.documents import PackedDocuments
from stages.engines.fsdp.parallelize import apply_recompute
from stages.engines.fsdp.probe import _InDoublePrecision, probe
from stages.engines.mixers import _by_document, mix_by_document, mixing
from stages.models.layers import decoder_of, text_layers
from stages.parallel.layout import Layout
from tests.zoo.models import tiny_config

CPU = torch.device("cpu")
PACKED = {
    "grouped queries": "qwen3",
    "no grouping": "olmo2",
    "learned positions": "gpt2",
    "mixture of experts": "qwen3_moe",
    "values narrower than keys": "deepseek_v3",
    "sliding window": "mistral",
    "soft-capped scores": "gemma2",
    "attention sinks": "gpt_oss",
}
AS_ROWS = {"position biases": "bloom", "attention in chunks": "llama4_text"}
"""Families of the zoo, by what is special in their attention."""
WITH_MIXERS = {"gated delta rule": "qwen3_5_text", "Mamba 2": "bamba", "short convolution": "lfm2"}
"""Families of the zoo, by what carries something along the sequence."""
LENGTHS = [7, 3, 6, 12, 1, 3]
FOR_MIXERS = [70, 3, 66, 12, 1, 16]
"""Lengths in tokens: two are longer than a chunk of the gated delta rule, and one of them is padded."""
ROWS = 2
Learned = tuple[Tensor, dict[str, Tensor]]
"""Hidden states [tokens, width], and the gradients by weight."""


def build(config: PreTrainedConfig, attention: str | None) -> nn.Module:
    torch.manual_seed(0)
    register_packed_attention()
    model = AutoModelForCausalLM.from_config(deepcopy(config), attn_implementation=attention)
    for parameter in model.parameters():
        if parameter.ndim > 1:  # large enough that a token that sees too much makes a difference
            nn.init.normal_(parameter, std=1.7 * parameter.shape[-1] ** -0.5)
    return model.eval()


def packed_batch(lengths: list[int], rows: int, vocabulary: int = 64) -> Batch:
    shape = (rows, sum(lengths) // rows)
    torch.manual_seed(1)
    return Batch.of(
        input_ids=torch.randint(1, vocabulary, shape),
        targets=torch.full(shape, IGNORED),
        position_ids=torch.cat([torch.arange(length) for length in lengths]).view(shape),
        documents=Documents(
            torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths)).view(shape), len(lengths), lengths
        ),
    )


def gradients_of(model: nn.Module, hidden: Tensor) -> dict[str, Tensor]:
    torch.manual_seed(2)
    (hidden * torch.randn(hidden.shape).to(hidden)).sum().backward()
    return {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}


@pytest.mark.parametrize("kind", [*PACKED, *AS_ROWS])
def test_packed_documents_equal_each_document_alone(kind: str) -> None:
    config = tiny_config((PACKED | AS_ROWS)[kind])
    attention = probe(config, trust_remote_code=False).attention
    assert (attention == PACKED_DOCUMENTS) == (kind in PACKED)
    batch = packed_batch(LENGTHS, ROWS)

    model = build(config, attention)
    packed = hidden_states(decoder_of(model), batch.inputs).flatten(0, 1)

    reference = build(config, "eager")
    documents = batch.inputs.input_ids.flatten().split(LENGTHS)
    alone = torch.cat(
        [decoder_of(reference)(input_ids=document[None], use_cache=False)[0][0] for document in documents]
    )

    torch.testing.assert_close(packed, alone, atol=1e-5, rtol=1e-5)
    found, expected = gradients_of(model, packed), gradients_of(reference, alone)
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        scale = gradient.abs().max().item()
        torch.testing.assert_close(found[name], gradient, atol=1e-5 * max(scale, 1.0), rtol=1e-5, msg=name)


def test_one_document_a_row_is_ordinary_causal_attention() -> None:
    batch = packed_batch([16, 16], rows=2)
    packed = hidden_states(build(tiny_config("qwen3"), PACKED_DOCUMENTS).base_model, batch.inputs)
    plain = build(tiny_config("qwen3"), "eager").base_model(input_ids=batch.inputs.input_ids, use_cache=False)[0]
    torch.testing.assert_close(packed, plain, atol=1e-5, rtol=1e-5)


def test_a_long_row_needs_no_mask_of_its_size() -> None:
    num_tokens = 2**17  # a mask of the row, one byte a pair, would take 16 GiB
    documents = PackedDocuments([16] * (num_tokens // 16), CPU)
    query, key, value = (torch.randn(1, 1, num_tokens, 4) for _ in range(3))
    output, _ = packed_attention(nn.Identity(), query, key, value, None, documents)
    assert output.shape == (1, num_tokens, 1, 4)
    first_tokens = output[0, ::16, 0]
    torch.testing.assert_close(first_tokens, value[0, 0, ::16])  # which see themselves alone


def test_a_model_that_hides_the_documents_from_its_attention_is_refused() -> None:
    states = torch.randn(1, 1, 4, 4)
    with pytest.raises(ModelError, match="where documents end"):
        packed_attention(nn.Identity(), states, states, states, None)


def test_recomputed_layers_see_the_same_documents() -> None:
    batch = packed_batch(LENGTHS, ROWS)
    expected, found = (build(tiny_config("qwen3"), PACKED_DOCUMENTS).train() for _ in range(2))
    found.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    expected_gradients, found_gradients = (
        gradients_of(model, hidden_states(model.base_model, batch.inputs)) for model in (expected, found)
    )
    torch.testing.assert_close(found_gradients, expected_gradients, atol=0, rtol=0)


def test_flash_attention_of_torch_2_11_gets_a_key_for_each_query(monkeypatch: pytest.MonkeyPatch) -> None:
    """Under torch 2.11, the flash attention kernel gets as many key and value heads as query heads.

    Emulates the GPU-only kernel `varlen_attn` by one attention a document, with torch 2.11's signature.
    """

    def varlen_attn(query, key, value, starts, _, longest, __, *, return_aux=None, scale=None, window_size=(-1, -1)):
        assert query.shape == key.shape == value.shape
        assert window_size == (-1, 0) and longest == 5
        documents = [
            functional.scaled_dot_product_attention(
                *(states[start:end].transpose(0, 1) for states in (query, key, value)), is_causal=True, scale=scale
            ).transpose(0, 1)
            for start, end in pairwise(starts.tolist())
        ]
        return torch.cat(documents)

    monkeypatch.setattr(attention_kernels, "varlen_attn", varlen_attn)
    monkeypatch.setattr(attention_kernels, "GROUPS_QUERIES", False)
    documents = PackedDocuments([3, 5], CPU)
    torch.manual_seed(0)
    query, key, value = torch.randn(8, 4, 8), torch.randn(8, 2, 8), torch.randn(8, 2, 8)
    scoring = attention_kernels.AttentionOptions(8**-0.5, 0.0, None, None, None)
    given = attention_kernels._flash(query, key, value, documents, scoring)
    expected = attention_kernels._padded(query, key, value, documents, scoring)
    assert (given - expected).abs().max().item() < 1e-6


def check_family(family: str) -> None:
    """Check packed documents against each alone: with large weights in fp64, and in fp32 as Transformers draws them."""
    check_in_double_precision(*both(family))
    check_in_single_precision(*both(family, as_drawn=True))


def both(family: str, *, as_drawn: bool = False) -> tuple[nn.Module, nn.Module]:
    """Return a family's model, ready for packed rows by the probe's verdict, and the same as Transformers has it.

    as_drawn: with the weights that Transformers draws, instead of large ones.
    """
    verdict = probe(tiny_config(family), trust_remote_code=False)
    assert verdict.packs and verdict.mixers
    models = [build(tiny_config(family), attention).train() for attention in (verdict.attention, "eager")]
    if as_drawn:
        torch.manual_seed(0)
        models[1] = AutoModelForCausalLM.from_config(tiny_config(family), attn_implementation="eager").train()
        models[0].load_state_dict(models[1].state_dict())
    for one in models:
        one.set_experts_implementation("eager")  # grouped products have no fp64
    mix_by_document(text_layers(models[0]), verdict.mixers)
    return models[0], models[1]


def check_in_double_precision(model: nn.Module, reference: nn.Module) -> None:
    with _InDoublePrecision():
        found, expected = learned(model.double()), learned_alone(reference.double())
    torch.testing.assert_close(found[0], expected[0], atol=1e-10, rtol=1e-10)
    assert found[1].keys() == expected[1].keys()
    for name, gradient in expected[1].items():
        assert (found[1][name] - gradient).abs().max() <= 1e-10 * gradient.abs().max().clamp(min=1.0), name


def check_in_single_precision(model: nn.Module, reference: nn.Module) -> None:
    """Check the gradient as a whole: where the terms of one weight's cancel out, fp32 keeps fewer digits of it."""
    found, expected = learned(model), learned_alone(reference)
    torch.testing.assert_close(found[0], expected[0], atol=1e-5, rtol=1e-5)
    assert found[1].keys() == expected[1].keys()
    gradients = (torch.cat([one[name].flatten() for name in expected[1]]) for one in (found[1], expected[1]))
    difference = (whole := next(gradients)) - next(gradients)
    assert difference.norm() <= 1e-5 * whole.norm()


def learned(model: nn.Module, device: torch.device = CPU) -> Learned:
    hidden = hidden_states(decoder_of(model), packed_batch(FOR_MIXERS, ROWS).to(device).inputs).flatten(0, 1)
    return hidden.detach(), gradients_of(model, hidden)


def learned_alone(reference: nn.Module) -> Learned:
    documents = packed_batch(FOR_MIXERS, ROWS).inputs.input_ids.flatten().split(FOR_MIXERS)
    decoder = decoder_of(reference)
    hidden = torch.cat([decoder(input_ids=one[None], use_cache=False)[0][0] for one in documents])
    return hidden.detach(), gradients_of(reference, hidden)


@pytest.mark.parametrize("mechanism", WITH_MIXERS)
def test_mixers_give_each_document_what_it_gets_alone(mechanism: str) -> None:
    check_family(WITH_MIXERS[mechanism])


@pytest.mark.parametrize("recompute", ["selective", "full"])
def test_recomputed_mixers_see_the_same_documents(recompute: str) -> None:
    found = []
    for layout in (Layout(), Layout(recompute=recompute)):  # type: ignore[arg-type]
        model, _ = both("qwen3_5_text")
        apply_recompute(model, layout)
        hidden = hidden_states(decoder_of(model), packed_batch(FOR_MIXERS, ROWS).inputs)
        with mixing(PackedDocuments([sum(FOR_MIXERS)], CPU)):  # of a batch that came in between
            found.append(gradients_of(model, hidden))
    assert all(torch.equal(found[0][name], one) for name, one in found[1].items())


def test_mixers_are_wrapped_once() -> None:
    """A reward model is made around a model whose mixers are wrapped already."""
    model, _ = both("lfm2")
    before = [module.forward for module in model.modules()]
    mix_by_document(text_layers(model), {type(model.model.layers[0].conv)})
    assert before == [module.forward for module in model.modules()]


def test_a_mixer_without_boundaries_of_documents_is_an_error() -> None:
    model, _ = both("lfm2")
    with pytest.raises(ModelError, match="without the boundaries of documents"):
        model(input_ids=torch.ones(1, 4, dtype=torch.long))


def test_arguments_that_are_no_states_of_tokens_are_refused() -> None:
    documents, states, mask = PackedDocuments([3, 2], CPU), torch.ones(1, 5, 4), torch.ones(1, 1, 5, 5)
    with mixing(documents), pytest.raises(ModelError, match=r"\[1, 1, 5, 5\], which cannot be laid out"):
        _by_document(lambda states, mask: states, states, mask)


def test_kernels_that_take_boundaries_get_one_row_of_all_documents(monkeypatch: pytest.MonkeyPatch) -> None:
    """Emulates flash-linear-attention's functions, which need a GPU, by Transformers', one document after the other."""
    calls = {"convolution": 0, "rule": 0}
    num_tokens = sum(FOR_MIXERS)

    def causal_conv1d(x, weight, bias, *, activation, cu_seqlens):  # type: ignore[no-untyped-def]
        assert x.shape == (1, num_tokens, len(weight)) and weight.ndim == 2 and cu_seqlens.dtype == torch.int64
        calls["convolution"] += 1
        parts = [x[:, begin:end].transpose(1, 2) for begin, end in pairwise(cu_seqlens.tolist())]
        mixed = [modeling_qwen3_5.causal_conv1d_fn(one, weight, bias, activation) for one in parts]
        return torch.cat(mixed, dim=2).transpose(1, 2), None

    def chunk_gated_delta_rule(q, k, v, *, g, beta, use_qk_l2norm_in_kernel, cu_seqlens):  # type: ignore[no-untyped-def]
        assert q.shape == k.shape and q.shape[:3] == v.shape[:3] == (*g.shape,) == (*beta.shape,)
        assert g.shape[:2] == (1, num_tokens) and cu_seqlens.tolist()[-1] == num_tokens
        calls["rule"] += 1
        options = {"use_qk_l2norm_in_kernel": use_qk_l2norm_in_kernel}
        parts = [slice(*ends) for ends in pairwise(cu_seqlens.tolist())]
        rule = modeling_qwen3_5.torch_chunk_gated_delta_rule
        mixed = [rule(q[:, i], k[:, i], v[:, i], g=g[:, i], beta=beta[:, i], **options)[0] for i in parts]
        return torch.cat(mixed, dim=1), None

    model, _ = both("qwen3_5_text")
    expected = learned(model)
    model.zero_grad()
    monkeypatch.setattr(state_kernels, "installed", lambda device: (causal_conv1d, chunk_gated_delta_rule))
    found = learned(model)
    assert calls == {"convolution": 1, "rule": 1}
    torch.testing.assert_close(found[0], expected[0], atol=1e-5, rtol=1e-5)
    for name, gradient in expected[1].items():
        assert (found[1][name] - gradient).norm() <= 1e-4 * gradient.norm().clamp(min=1.0), name
