"""Parameters and FLOPs that we count from a model's config equal those of its Transformers model."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from stages.core.errors import ModelError
from stages.models.facts import ModelFacts
from stages.models.shape import LatentAttention, ModelShape
from stages.models.transformers_flops import model_flops

SIZES = {"hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4, "vocab_size": 50}
GROUPED = {**SIZES, "num_key_value_heads": 2, "intermediate_size": 48}
CONFIGS = [
    ("llama", {**GROUPED, "attention_bias": True, "mlp_bias": True}),
    ("llama", {**GROUPED, "head_dim": 16, "tie_word_embeddings": True}),
    ("mistral", {**GROUPED, "sliding_window": 7}),
    ("qwen2", GROUPED),
    ("qwen3", {**GROUPED, "head_dim": 16}),
    ("qwen3_moe", {**GROUPED, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}),
    (
        "qwen3_moe",
        {**GROUPED, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "mlp_only_layers": [1]},
    ),
    ("mixtral", {**GROUPED, "num_local_experts": 4, "num_experts_per_tok": 2}),
    ("gpt2", {"n_embd": 32, "n_layer": 3, "n_head": 4, "vocab_size": 50, "n_positions": 20}),
    ("opt", {**SIZES, "ffn_dim": 48, "max_position_embeddings": 20, "word_embed_proj_dim": 32}),
    ("bloom", {"hidden_size": 32, "n_layer": 3, "n_head": 4, "vocab_size": 50}),
    ("mpt", {"d_model": 32, "n_layers": 3, "n_heads": 4, "vocab_size": 50}),
]


def transformers_model(family: str, fields: dict) -> tuple[dict, torch.nn.Module]:
    """Return a model config as its JSON file holds it, and the Transformers model of it without weights."""
    config = AutoConfig.for_model(family, **fields)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    return json.loads(config.to_json_string(use_diff=False)), model


@pytest.mark.parametrize(("family", "fields"), CONFIGS)
def test_parameters_are_those_of_the_transformers_model(family, fields):
    config, model = transformers_model(family, fields)
    assert ModelFacts(config).shape.num_parameters == sum(p.numel() for p in model.parameters())


@pytest.mark.parametrize(("family", "fields"), [case for case in CONFIGS if case[0] not in ("bloom", "mpt")])
def test_flops_are_those_counted_on_the_model(family, fields):
    config, model = transformers_model(family, fields)
    counted, expected = ModelFacts(config).shape.flops(), model_flops(model)
    assert counted.training([17, 3], 11) == pytest.approx(expected.training([17, 3], 11))


def test_text_part_of_a_multimodal_config_is_read():
    text = {"model_type": "qwen3", **GROUPED, "head_dim": 8}
    assert ModelFacts({"model_type": "qwen3_vl", "text_config": text}).shape.num_layers == 3


@pytest.mark.parametrize("field", ["hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size"])
def test_what_is_lacking_is_named(field):
    config = {"model_type": "llama", **GROUPED}
    del config[field]
    with pytest.raises(ModelError, match=field):
        _ = ModelFacts(config).shape


@pytest.mark.parametrize("value", [0, -4, 2.5, "8", True])
def test_a_size_that_is_no_positive_whole_number_is_named(value):
    with pytest.raises(ModelError, match="vocab_size"):
        _ = ModelFacts({"model_type": "llama", **GROUPED, "vocab_size": value}).shape


def test_unknown_family_is_refused_with_those_known():
    with pytest.raises(ModelError, match=r"'mamba'.*llama"):
        _ = ModelFacts({"model_type": "mamba", **GROUPED}).shape


def test_a_shape_survives_being_json():
    dense = ModelFacts({"model_type": "llama", **GROUPED}).shape
    mixture = replace(dense, num_experts=8, experts_per_token=2, expert_ffn_size=512, dense_layers=frozenset({0, 3}))
    assert ModelShape.from_json(dense.to_json()) == dense
    assert ModelShape.from_json(mixture.to_json()) == mixture
    earlier = {**json.loads(dense.to_json()), "rope_theta": 1e4}  # a field of shapes that were logged before
    assert ModelShape.from_json(json.dumps(earlier)) == dense


def test_latent_attention_has_the_parameters_and_flops_of_the_transformers_model():
    """Parameters and FLOPs of a DeepSeek-V3 with latent attention equal those of its Transformers model.

    Its shared expert is counted as one to which every token is routed; norms are not counted.
    """
    fields = {
        "vocab_size": 512, "hidden_size": 256, "intermediate_size": 512, "moe_intermediate_size": 128,
        "num_hidden_layers": 3, "first_k_dense_replace": 1, "num_attention_heads": 4, "num_key_value_heads": 4,
        "n_routed_experts": 8, "n_shared_experts": 1, "num_experts_per_tok": 2, "q_lora_rank": 96, "kv_lora_rank": 64,
        "qk_nope_head_dim": 32, "qk_rope_head_dim": 16, "v_head_dim": 32,
    }  # fmt: skip
    _, model = transformers_model("deepseek_v3", fields)
    shape = ModelShape(
        3, 256, 4, 4, 32, 512, 512, num_experts=9, experts_per_token=3, expert_ffn_size=128,
        dense_layers=frozenset({0}), latent=LatentAttention(query_rank=96, kv_rank=64, rotary_dim=16),
    )  # fmt: skip
    norms, routers = 3 * (96 + 64), 2 * 256
    assert shape.num_parameters == sum(one.numel() for one in model.parameters()) - norms + routers
    counted = model_flops(model).training([64, 32], 96)
    assert shape.flops().training([64, 32], 96) == pytest.approx(counted, rel=0.01)
