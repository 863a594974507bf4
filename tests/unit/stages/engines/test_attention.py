"""Packed attention gives each document the hidden states and gradients that Transformers gives it alone."""

from __future__ import annotations

from copy import deepcopy
from itertools import pairwise

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import AutoModelForCausalLM, PreTrainedConfig

from stages.core.errors import ModelError
from stages.data.batch import IGNORED, Batch, Documents
from stages.engines import attention_kernels
from stages.engines.attention import PACKED_DOCUMENTS, hidden_states, packed_attention, register_packed_attention
from stages.engines.documents import PackedDocuments
from stages.engines.fsdp.layers import decoder_of
from stages.engines.fsdp.probe import probe
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
AS_ROWS = {"position biases": "bloom", "attention in chunks": "llama4_text", "recurrent state": "mamba"}
"""Families of the zoo, by what is special in their attention."""
LENGTHS = [7, 3, 6, 12, 1, 3]
ROWS = 2


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
    (hidden * torch.randn(hidden.shape)).sum().backward()
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
