"""Tiny models for tests of quantization: one of each architecture that needs its own treatment."""

from __future__ import annotations

from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

SIZES: dict[str, Any] = {
    "vocab_size": 64, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64, "pad_token_id": 0, "bos_token_id": 0, "eos_token_id": 0,
}  # fmt: skip
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 64}
GROUPS = {"n_group": 1, "topk_group": 1, "n_shared_experts": 1, "first_k_dense_replace": 1, "n_routed_experts": 4}
GPT2 = {"vocab_size": 64, "n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 64}
FALCON = {"vocab_size": 64, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
SHAPES: dict[str, dict[str, Any]] = {
    "llama": SIZES,
    "qwen3": {**SIZES, "head_dim": 32},
    "olmo2": {**SIZES, "num_key_value_heads": 4},
    "glm4": {**SIZES, "head_dim": 32},
    "gemma3_text": {**SIZES, "head_dim": 32, "query_pre_attn_scalar": 32},
    "phi3": SIZES,
    "cohere": SIZES,
    "nemotron": SIZES,
    "qwen3_moe": {**SIZES, **EXPERTS, "head_dim": 32, "num_experts": 4},
    "mixtral": {**SIZES, "head_dim": 32, "num_experts_per_tok": 2, "num_local_experts": 4},
    "phimoe": {**SIZES, "num_experts_per_tok": 2, "num_local_experts": 4},
    "glm4_moe": {**SIZES, **EXPERTS, **GROUPS, "head_dim": 32},
    "deepseek_v3": {
        **SIZES,
        **EXPERTS,
        **GROUPS,
        "num_key_value_heads": 4,
        "kv_lora_rank": 32,
        "q_lora_rank": 32,
        "qk_rope_head_dim": 16,
        "qk_nope_head_dim": 16,
        "v_head_dim": 32,
    },
    "qwen3_5_text": {
        **SIZES,
        "head_dim": 32,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 2,
        "linear_key_head_dim": 32,
        "linear_value_head_dim": 32,
        "layer_types": ["linear_attention", "full_attention"],
    },
    "gpt_oss": {**SIZES, "num_experts_per_tok": 2, "head_dim": 32, "num_local_experts": 4, "intermediate_size": 64},
    "gpt2": {**GPT2, "bos_token_id": 0, "eos_token_id": 0},
    "falcon": {**FALCON, "bos_token_id": 0, "eos_token_id": 0},
}


def make_family(model_type: str) -> PreTrainedModel:
    """Return a tiny model with random weights, also of norms, since scaling errors would not show with 1."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(model_type, **SHAPES[model_type])
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.add_(torch.randn_like(parameter), alpha=0.1)
            else:
                parameter.mul_(4)
    return model.eval()
