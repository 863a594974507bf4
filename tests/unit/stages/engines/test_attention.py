"""Packed attention gives each document the hidden states and gradients that Transformers gives it alone."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import (
    AutoModelForCausalLM,
    BloomConfig,
    DeepseekV3Config,
    Gemma2Config,
    GPT2Config,
    GptOssConfig,
    Llama4TextConfig,
    LlamaConfig,
    MambaConfig,
    MistralConfig,
    PreTrainedConfig,
    Qwen3Config,
    Qwen3MoeConfig,
)

from stages.core.errors import ModelError
from stages.data.batch import IGNORED, Batch, Documents
from stages.engines import attention
from stages.engines.attention import PACKED_DOCUMENTS, hidden_states, packed_attention, prepare_attention
from stages.engines.documents import PackedDocuments
from stages.engines.fsdp.model import decoder_of

CPU = torch.device("cpu")
SHAPE = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "pad_token_id": 0,
}
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 16}
LATENT = {"q_lora_rank": 8, "kv_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 8, "v_head_dim": 6}

PACKED: dict[str, Callable[[], PreTrainedConfig]] = {
    "grouped queries": lambda: Qwen3Config(**SHAPE, head_dim=8),
    "no grouping": lambda: LlamaConfig(**{**SHAPE, "num_key_value_heads": 4}),
    "learned positions": lambda: GPT2Config(vocab_size=64, n_embd=32, n_layer=2, n_head=4, n_positions=32),
    "mixture of experts": lambda: Qwen3MoeConfig(**SHAPE, **EXPERTS, head_dim=8, num_experts=4),
    "values narrower than keys": lambda: DeepseekV3Config(
        **{**SHAPE, "num_key_value_heads": 4}, **EXPERTS, **LATENT, n_routed_experts=4, n_group=1, topk_group=1
    ),
    "sliding window": lambda: MistralConfig(**SHAPE, sliding_window=4),
    "soft-capped scores": lambda: Gemma2Config(**SHAPE, head_dim=8, sliding_window=4, attn_logit_softcapping=2.0),
    "attention sinks": lambda: GptOssConfig(
        **SHAPE, head_dim=8, sliding_window=4, num_local_experts=4, num_experts_per_tok=2
    ),
}
AS_ROWS: dict[str, Callable[[], PreTrainedConfig]] = {
    "position biases": lambda: BloomConfig(vocab_size=64, hidden_size=32, n_layer=2, n_head=4),
    "attention in chunks": lambda: Llama4TextConfig(
        **SHAPE, head_dim=8, intermediate_size_mlp=48, num_local_experts=4, attention_chunk_size=8
    ),
    "recurrent state": lambda: MambaConfig(vocab_size=64, hidden_size=32, num_hidden_layers=2, state_size=4),
}
LENGTHS = [7, 3, 6, 12, 1, 3]
ROWS = 2


def build(config: PreTrainedConfig, attn_implementation: str) -> nn.Module:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, attn_implementation=attn_implementation)
    for parameter in model.parameters():
        if parameter.ndim > 1:  # large enough that a token that sees too much makes a difference
            nn.init.normal_(parameter, std=0.3)
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
    attn_implementation = prepare_attention((PACKED | AS_ROWS)[kind](), CPU)
    assert (attn_implementation == PACKED_DOCUMENTS) == (kind in PACKED)
    batch = packed_batch(LENGTHS, ROWS)

    model = build((PACKED | AS_ROWS)[kind](), attn_implementation)
    packed = hidden_states(decoder_of(model), batch.inputs).flatten(0, 1)

    reference = build((PACKED | AS_ROWS)[kind](), "eager")
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
    config = PACKED["grouped queries"]()
    batch = packed_batch([16, 16], rows=2)
    packed = hidden_states(build(config, prepare_attention(config, CPU)).base_model, batch.inputs)
    plain = build(PACKED["grouped queries"](), "eager").base_model(input_ids=batch.inputs.input_ids, use_cache=False)[0]
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
    config = PACKED["grouped queries"]()
    batch = packed_batch(LENGTHS, ROWS)
    expected, found = (build(config, prepare_attention(config, CPU)).train() for _ in range(2))
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

    monkeypatch.setattr(attention, "varlen_attn", varlen_attn)
    documents = PackedDocuments([3, 5], CPU)
    torch.manual_seed(0)
    query, key, value = torch.randn(8, 4, 8), torch.randn(8, 2, 8), torch.randn(8, 2, 8)
    scoring = attention.AttentionOptions(8**-0.5, 0.0, None, None, None)
    given = attention._flash_attention(query, key, value, documents, scoring)
    expected = attention._bucketed_attention(query, key, value, documents, scoring)
    assert (given - expected).abs().max().item() < 1e-6
