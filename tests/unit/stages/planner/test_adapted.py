"""Predicted numbers of LoRA parameters equal those of PEFT with the same adapter config."""

import json

import pytest
import torch
from peft.tuners.lora import LoraLayer
from transformers import AutoConfig, AutoModelForCausalLM

from stages.adapters.config import AdapterConfig
from stages.adapters.lora import add_adapter, store_base
from stages.models.facts import ModelFacts
from stages.models.transformers_flops import model_flops
from stages.parallel.layout import Layout
from stages.planner.adapted import (
    PlannedAdapter,
    adapted_flops,
    decoding_bytes,
    frozen_bytes,
    gathered_layer_bytes,
    learning_parameters,
    trained_parameters,
)
from stages.planner.partition import pipeline_stages

ROTARY = {
    "num_hidden_layers": 4, "hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 100,
}  # fmt: skip
MIXTURE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "head_dim": 16}
MIXTURES = {
    "qwen3_moe": {**ROTARY, **MIXTURE, "mlp_only_layers": [0]},
    "mixtral": {**ROTARY, "num_local_experts": 4, "num_experts_per_tok": 2},
}
FAMILIES = {
    "llama": ROTARY,
    "mistral": ROTARY,
    "qwen2": ROTARY,
    "qwen3": {**ROTARY, "head_dim": 16},
    "gpt2": {"n_layer": 2, "n_embd": 64, "n_head": 4, "vocab_size": 100, "n_positions": 32},
    "opt": {"num_hidden_layers": 2, "hidden_size": 64, "ffn_dim": 96, "num_attention_heads": 4, "vocab_size": 100,
            "word_embed_proj_dim": 64},
    "bloom": {"n_layer": 2, "hidden_size": 64, "n_head": 4, "vocab_size": 100},
    "mpt": {"n_layers": 2, "d_model": 64, "n_heads": 4, "vocab_size": 100, "expansion_ratio": 4},
}  # fmt: skip
ADAPTERS = [
    {"rank": 4},
    {"rank": 8, "target_modules": ["q_proj", "down_proj"]},
    {"rank": 8, "target_modules": "model.layers.[02].self_attn.(q|v)_proj"},
    {"rank": 4, "exclude_modules": ["up_proj", "self_attn.k_proj"]},
    {"rank": 4, "target_modules": ["up_proj"], "layers_to_transform": [1, 3]},
    {"rank": 4, "use_dora": True},
    {"rank": 4, "modules_to_save": ["lm_head", "norm"]},
    {"rank": 4, "modules_to_save": ["mlp"]},
    {"rank": 4, "target_modules": ["q_proj"], "modules_to_save": ["mlp", "embed_tokens"]},
]
EXPERT_ADAPTERS = [
    {},
    {"target_modules": ["q_proj", "gate_proj", "up_proj"]},
    {"target_modules": ["gate"], "layers_to_transform": [1, 2]},
    {"exclude_modules": ["experts"]},
    {"exclude_modules": ["down_proj", "gate"], "layers_to_transform": [3]},
    {"target_modules": [], "target_parameters": ["down_proj"]},
    {"target_modules": ["k_proj"], "target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]},
    {"target_modules": r".*\.[12]\.mlp\.experts\..*|.*\.3\.self_attn\.q_proj"},
    {"target_modules": r".*\.mlp\.gate"},
    {"modules_to_save": ["mlp.gate"], "exclude_modules": ["gate"]},
]


def adapted_model(family, fields, adapter):
    """Return a Transformers model with PEFT's adapter, and the planner's description of the same model's sizes."""
    config = AutoConfig.for_model(family, **fields)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    model.to_empty(device="cpu")
    model.tie_weights()
    add_adapter(model, adapter, seed=0)
    return model, ModelFacts(config.to_dict()).shape


def learning(shape, adapter):
    (stage,) = pipeline_stages(shape.num_layers, 1)
    return trained_parameters(shape, adapter.for_planner, False, stage, tp=1, vpp=1)


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_has_the_linear_layers_of_its_transformers_model(family):
    adapter = AdapterConfig(rank=4)
    model, shape = adapted_model(family, FAMILIES[family], adapter)
    assert learning(shape, adapter) == sum(one.numel() for one in model.parameters() if one.requires_grad)


@pytest.mark.parametrize("fields", ADAPTERS, ids=str)
def test_targets_are_those_of_peft(fields):
    adapter = AdapterConfig.model_validate_json(json.dumps(fields))
    model, shape = adapted_model("llama", ROTARY, adapter)
    assert learning(shape, adapter) == sum(one.numel() for one in model.parameters() if one.requires_grad)
    if not adapter.use_dora:  # whose lengths of rows are parameters, but no matrices
        assert adapted_flops(shape, adapter.for_planner) == model_flops(model)


def test_experts_of_a_mixture_have_no_linear_layers():
    adapter = AdapterConfig(rank=4, target_modules=("q_proj", "o_proj"))
    model, shape = adapted_model("qwen3_moe", {**ROTARY, **MIXTURE, "mlp_only_layers": [0]}, adapter)
    assert learning(shape, adapter) == sum(one.numel() for one in model.parameters() if one.requires_grad)


@pytest.mark.parametrize("family", MIXTURES)
@pytest.mark.parametrize("fields", EXPERT_ADAPTERS, ids=str)
def test_experts_and_routers_learn_where_peft_has_them(family, fields):
    former = {"gate_proj": "w1", "up_proj": "w3"} if family == "mixtral" else {}
    if isinstance(names := fields.get("target_modules"), list):
        fields = {**fields, "target_modules": [former.get(name, name) for name in names]}
    adapter = AdapterConfig.model_validate_json(json.dumps({"rank": 4, **fields}))
    model, shape = adapted_model(family, MIXTURES[family], adapter)
    learns = {name: one.numel() for name, one in model.named_parameters() if one.requires_grad}
    (stage,) = pipeline_stages(shape.num_layers, 1)
    found = learning_parameters(shape, False, Layout(), 1, adapter.for_planner, stage)
    assert found.total == sum(learns.values())
    assert found.expert == sum(size for name, size in learns.items() if ".experts" in name)
    assert adapted_flops(shape, adapter.for_planner) == model_flops(model)


def test_experts_adapters_lie_with_their_experts():
    """Under expert parallelism, each rank has only the adapters of its own experts.

    In Mixtral's shape, rank 4: the joint gate and up matrices have rank 8, and `etp` cuts one factor of each pair.
    """
    shape, adapter = (
        ModelFacts(AutoConfig.for_model("mixtral", **MIXTURES["mixtral"]).to_dict()).shape,
        PlannedAdapter(4),
    )
    (stage,) = pipeline_stages(shape.num_layers, 1)
    whole, spread, cut = (
        learning_parameters(shape, True, Layout(dp_shard=4, tp=tp, ep=ep, etp=etp), etp, adapter, stage)
        for tp, ep, etp in ((1, 1, 1), (1, 2, 1), (2, 2, 2))
    )
    hidden, width = 64, 128
    assert whole.expert == 4 * 4 * (8 * (hidden + 2 * width) + 4 * (width + hidden))
    assert spread.expert == whole.expert / 2 and spread.dense == whole.dense
    assert cut.expert == 4 * 2 * (8 * (hidden + 2 * width / 2) + 4 * (width / 2 + hidden))


@pytest.mark.parametrize("precision", [None, "bf16", "fp32", "nf4", "int8"])
@pytest.mark.parametrize("compute_dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_frozen_base_takes_the_bytes_that_it_is_stored_in(precision, compute_dtype):
    adapter = AdapterConfig(rank=4, base_precision=precision, modules_to_save=("lm_head",))
    model, shape = adapted_model("llama", ROTARY, adapter)
    store_base(model, precision, compute_dtype)
    stored = sum(one.numel() * one.element_size() for one in model.parameters() if not one.requires_grad)
    assert frozen_bytes(shape, adapter.for_planner, compute_dtype.itemsize) == stored


def test_fsdp_gathers_codes_as_they_are_and_weights_as_they_are_computed():
    sizes = {}
    for precision in ("bf16", "fp32", "nf4", "int8"):
        adapter = AdapterConfig(rank=4, base_precision=precision)
        _, shape = adapted_model("llama", ROTARY, adapter)
        sizes[precision] = gathered_layer_bytes(shape, adapter.for_planner, 2)
    assert sizes["bf16"] == sizes["fp32"]  # both in bf16
    assert sizes["nf4"] < sizes["int8"] < sizes["bf16"]


@pytest.mark.parametrize("precision", ["nf4", "int8"])
def test_decoding_reads_what_is_stored_and_writes_what_is_computed(precision):
    adapter = AdapterConfig(rank=4, base_precision=precision)
    model, shape = adapted_model("llama", ROTARY, adapter)
    layer = model.model.layers[0]
    written = sum(2 * one.base_layer.weight.numel() for one in layer.modules() if isinstance(one, LoraLayer))
    store_base(model, precision, torch.bfloat16)
    read = sum(one.numel() for one in layer.parameters() if one.dtype == torch.uint8)
    assert decoding_bytes(shape, adapter.for_planner, 2) == written + read
    assert decoding_bytes(shape, AdapterConfig(rank=4).for_planner, 2) == 0


def test_stages_of_a_pipeline_hold_the_adapters_of_their_own_layers():
    config = AutoConfig.for_model("llama", **ROTARY)
    shape, adapter = (
        ModelFacts(config.to_dict()).shape,
        AdapterConfig(rank=4, layers_to_transform=(0, 1, 2), target_modules=("q_proj",)).for_planner,
    )
    first, last = (trained_parameters(shape, adapter, True, stage, 1, 1) for stage in pipeline_stages(4, 2))
    assert first == 2 * last > 0


def test_megatron_has_factors_for_all_that_it_joins():
    """Megatron's fused QKV has one adapter, of equal size for queries alone, whose other rows then stay 0."""
    config = AutoConfig.for_model("llama", **ROTARY)
    shape, (stage,) = ModelFacts(config.to_dict()).shape, pipeline_stages(4, 1)
    queries, all_of_them = (
        trained_parameters(shape, AdapterConfig(rank=4, target_modules=names).for_planner, True, stage, 2, 1)
        for names in (("q_proj",), ("q_proj", "k_proj", "v_proj"))
    )
    assert queries == all_of_them == 4 * 4 * (3 * 64 + (64 + 2 * 32) / 2)
