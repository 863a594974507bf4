"""Megatron recipes have parallel layouts that are legal, give no warning, and fit their GPUs."""

from pathlib import Path

import pytest

from flows.recipe.recipe import load_recipe
from stages.models.facts import ModelFacts
from stages.parallel.engines.registry import RULES
from stages.planner.memory import memory

CONFIGS = Path(__file__).parents[3] / "configs"
GPU_GIB = 80
LLAMA_70B = {
    "model_type": "llama", "num_hidden_layers": 80, "hidden_size": 8192, "intermediate_size": 28672,
    "num_attention_heads": 64, "num_key_value_heads": 8, "vocab_size": 128256, "max_position_embeddings": 131072,
}  # fmt: skip
QWEN3_8B = {
    "model_type": "qwen3", "num_hidden_layers": 36, "hidden_size": 4096, "intermediate_size": 12288, "head_dim": 128,
    "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 151936, "max_position_embeddings": 32768,
}  # fmt: skip
QWEN3_30B = {
    "model_type": "qwen3_moe", "num_hidden_layers": 48, "hidden_size": 2048, "intermediate_size": 6144, "head_dim": 128,
    "num_attention_heads": 32, "num_key_value_heads": 4, "vocab_size": 151936, "max_position_embeddings": 32768,
    "num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768, "norm_topk_prob": True,
}  # fmt: skip
"""Sizes of published models, as in their config.json on the Hugging Face hub."""
PARAMETERS = {
    "llama-3.1-70b-megatron": 70.55e9,
    "qwen3-8b-megatron": 8.19e9,
    "qwen3-30b-a3b-megatron": 30.53e9,
    "qwen3-30b-a3b-lora-megatron": 30.53e9,
}
RECIPES = {
    "qwen3-8b-megatron": (QWEN3_8B, 8, {"tp": 2, "dp_shard": 4}),
    "llama-3.1-70b-megatron": (LLAMA_70B, 64, {"tp": 8, "pp": 4, "vpp": 5}),
    "qwen3-30b-a3b-megatron": (QWEN3_30B, 16, {"pp": 2, "ep": 8}),
    "llama-3.1-70b-64k-megatron": (LLAMA_70B, 64, {"tp": 4, "pp": 4, "cp": 4}),
    "llama-3.1-70b-lora-8gpu": (LLAMA_70B, 8, {"tp": 8, "sequence_parallel": True}),
    "qwen3-30b-a3b-lora-megatron": (QWEN3_30B, 8, {"dp_shard": 8, "ep": 8}),
}


def training_stages(name):
    recipe = load_recipe(CONFIGS / f"{name}.yaml")
    return [config for config in recipe.stages.values() if config.kind == "train"]


@pytest.mark.parametrize("name", RECIPES)
def test_the_layout_is_the_one_that_the_recipe_is_named_for(name):
    _, num_gpus, degrees = RECIPES[name]
    for config in training_stages(name):
        assert config.engine == "megatron"
        assert config.processes * config.execution.nodes == config.layout.world_size == num_gpus
        assert config.layout.model_dump(include=set(degrees)) == degrees


@pytest.mark.parametrize("name", RECIPES)
def test_the_model_allows_the_layout_and_nothing_about_it_is_unwise(name):
    shape = ModelFacts(RECIPES[name][0]).shape
    assert shape.num_parameters == pytest.approx(PARAMETERS.get(name, 70.55e9), rel=1e-3)
    for config in training_stages(name):
        assert list(RULES[config.engine].model_errors(config.layout, shape)) == []
        assert list(RULES[config.engine].layout_warnings(config.layout, config.constraints, shape)) == []
        assert config.data.sequence_length <= shape.max_positions


@pytest.mark.parametrize("name", RECIPES)
def test_the_predicted_memory_fits_with_a_tenth_to_spare(name):
    shape = ModelFacts(RECIPES[name][0]).shape
    for config in training_stages(name):
        assert memory(shape, config.engine, config.layout, config.workload).peak_gib < 0.9 * GPU_GIB


@pytest.mark.parametrize("name", [name for name in RECIPES if "lora" in name])
def test_an_adapter_is_trained_on_a_node_where_whole_weights_would_not_fit(name):
    (config,) = training_stages(name)
    shape = ModelFacts(RECIPES[name][0]).shape
    whole = config.model_copy(update={"adapter": None})
    assert config.execution.nodes == 1 and config.product == "adapter"
    assert memory(shape, config.engine, config.layout, whole.workload).peak_gib > 0.9 * GPU_GIB


def test_the_quickstart_differs_from_the_one_on_fsdp_in_engine_and_layout_only():
    ours, other = (load_recipe(CONFIGS / f"{name}.yaml").stages for name in ("quickstart-megatron", "quickstart"))
    assert (ours["sft"].layout.tp, ours["dpo"].layout.pp) == (2, 2)
    assert [config.engine for config in ours.values() if config.kind == "train"] == ["megatron", "megatron"]
    assert {name: config.resume_identity() for name, config in ours.items()} == {
        name: config.resume_identity() for name, config in other.items()
    }
