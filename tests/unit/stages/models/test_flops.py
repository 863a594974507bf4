"""Our FLOPs formula equals torch's FLOP counter on a training step, minus attention that the causal mask hides."""

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.flop_counter import FlopCounterMode
from transformers import (
    AutoModelForCausalLM,
    DeepseekV3Config,
    Gemma4TextConfig,
    GPT2Config,
    Mamba2Config,
    MistralConfig,
    Qwen3Config,
    Qwen3MoeConfig,
)

from stages.models.flops import AttentionWork, ModelFlops, attended_pairs, model_flops_utilization
from stages.models.transformers_flops import model_flops

NUM_TOKENS = 16
SHAPE = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 16}
CONFIGS: dict[str, Any] = {
    "grouped queries, tied head": Qwen3Config(**SHAPE, head_dim=16, tie_word_embeddings=True),
    "untied head": Qwen3Config(**SHAPE, head_dim=8, tie_word_embeddings=False),
    "learned positions": GPT2Config(vocab_size=64, n_embd=32, n_layer=2, n_head=4, n_positions=32),
    "mixture of experts": Qwen3MoeConfig(**SHAPE, **EXPERTS, head_dim=8, num_experts=8),
    "latent attention, shared expert": DeepseekV3Config(
        **{**SHAPE, "num_key_value_heads": 4},
        **EXPERTS,
        n_routed_experts=8,
        n_shared_experts=1,
        first_k_dense_replace=1,
        q_lora_rank=8,
        kv_lora_rank=8,
        qk_rope_head_dim=4,
        qk_nope_head_dim=8,
        v_head_dim=6,
        n_group=1,
        topk_group=1,
    ),
}


@pytest.mark.parametrize("kind", CONFIGS)
def test_equal_to_the_operations_that_are_run(kind: str) -> None:
    config = CONFIGS[kind]
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager", experts_implementation="eager")
    input_ids = torch.randint(64, (1, NUM_TOKENS))
    with FlopCounterMode(display=False) as counter:
        model(input_ids=input_ids, use_cache=False).logits.sum().backward()
    flops = model_flops(model)
    hidden_pairs = NUM_TOKENS**2 - attended_pairs(NUM_TOKENS)
    hidden_flops = 3 * sum(2 * work.width * hidden_pairs for work in flops.attention)
    counted = counter.get_total_flops() - hidden_flops
    assert flops.training([NUM_TOKENS], num_targets=NUM_TOKENS) == pytest.approx(counted, rel=0.01)


def test_a_model_that_keeps_a_state_has_no_attention_to_count() -> None:
    sizes = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 1, "state_size": 8, "n_groups": 1}
    config = Mamba2Config(**sizes, num_heads=4, head_dim=16)
    flops = model_flops(AutoModelForCausalLM.from_config(config))
    assert flops.attention == ()
    assert flops.layer_parameters > 0


@given(st.integers(1, 60), st.integers(1, 80))
def test_attended_pairs_are_those_of_the_mask(num_tokens: int, window_tokens: int) -> None:
    mask = torch.ones(num_tokens, num_tokens).tril().triu(1 - window_tokens)
    assert attended_pairs(num_tokens, window_tokens) == int(mask.sum())
    assert attended_pairs(num_tokens) == num_tokens * (num_tokens + 1) // 2


def test_a_window_limits_the_layers_that_have_one() -> None:
    config = MistralConfig(**SHAPE, sliding_window=4)
    config.layer_types = ["full_attention", "sliding_attention"]
    flops = model_flops(AutoModelForCausalLM.from_config(config))
    width = 4 * (8 + 8)
    assert flops.attention == (AttentionWork(width, None), AttentionWork(width, 4))


def test_heads_of_two_widths_count_as_wide_as_they_are() -> None:
    """Gemma 4's global layers have wider heads, for which its config has no one width."""
    fields = {"num_hidden_layers": 3, "head_dim": 8, "global_head_dim": 16, "sliding_window": 4}
    types = ["sliding_attention", "sliding_attention", "full_attention"]
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(Gemma4TextConfig(**SHAPE | fields, layer_types=types))
    windowed, full = 2 * 4 * (8 + 8), 4 * (16 + 16)
    assert model_flops(model).attention == (AttentionWork(full, None), AttentionWork(windowed, 4))
    assert model_flops(model, predicts_ahead=True).attention[0] == AttentionWork(2 * full, None)


def test_packed_documents_do_not_attend_to_each_other() -> None:
    flops = ModelFlops(layer_parameters=0, head_parameters=0, attention=(AttentionWork(10, None),))
    assert flops.forward([8, 8], 0) == 2 * flops.forward([8], 0) < flops.forward([16], 0)


def test_the_head_is_counted_where_there_are_targets() -> None:
    flops = ModelFlops(layer_parameters=100, head_parameters=1000, attention=())
    assert flops.training([5, 5], num_targets=3) == 3 * 2 * (10 * 100 + 3 * 1000)


def test_utilization_is_relative_to_all_devices() -> None:
    assert model_flops_utilization(flops=8e12, seconds=2.0, peak_flops_per_s=4e12, num_devices=2) == pytest.approx(0.5)


def test_a_measured_peak_that_is_exceeded_was_the_peak() -> None:
    assert model_flops_utilization(flops=3e12, seconds=1.0, peak_flops_per_s=1e12) == 1.0


def test_gemma_4_calls_its_chosen_experts_by_another_name() -> None:
    fields = {
        "enable_moe_block": True,
        "head_dim": 8,
        "global_head_dim": 8,
        "num_experts": 8,
        "top_k_experts": 2,
        "moe_intermediate_size": 16,
    }
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(Gemma4TextConfig(**SHAPE, **fields))
    of_experts = sum(one.numel() for name, one in model.named_parameters() if ".experts." in name)
    config, counted = model.config, model_flops(model).layer_parameters
    config.top_k_experts = 4
    assert model_flops(model).layer_parameters - counted == of_experts * 2 / 8 > 0
