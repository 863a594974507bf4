"""Megatron adapters follow PEFT's config: each expert of a mixture has one, and unsupported layers are refused."""

import pytest
import torch
from transformers import AutoModelForCausalLM, Qwen3MoeConfig

from stages.adapters.config import AdapterConfig
from stages.adapters.effect import join_experts, split_experts
from stages.core.errors import ModelError
from stages.engines.megatron.compat import prepare_megatron
from stages.engines.megatron.families import rules_of

prepare_megatron()
from stages.engines.megatron.adapter import peft_adapter  # noqa: E402

SIZES = {"vocab_size": 32, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "head_dim": 8}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 12, "num_key_value_heads": 1}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("mixture")
    AutoModelForCausalLM.from_config(Qwen3MoeConfig(**SIZES, **EXPERTS), dtype=torch.float32).save_pretrained(folder)
    return folder


def test_all_linear_is_what_peft_takes_it_for_experts_and_router_included(folder):
    adapter = peft_adapter(folder, AdapterConfig(rank=3), seed=0)
    assert len(adapter.layers) == 4 + 3
    block = "model.layers.0.mlp"
    assert adapter.layers[f"{block}.experts.base_layer"][0] == 2 * adapter.layers[f"{block}.experts"][0] == 6
    shapes = {name: tuple(one.shape) for name, one in adapter.first_values.items()}
    assert shapes[f"{block}.experts.base_layer.3.lora_B.default.weight"] == (24, 6)
    assert shapes[f"{block}.experts.3.lora_A.default.weight"] == (3, 12)
    assert shapes[f"{block}.gate.lora_B.default.weight"] == (4, 3)
    names = [name for rule in rules_of("qwen3_moe") for name in rule.weights]
    assert {name.format(layer=0, expert=expert) for name in names for expert in range(4)} >= shapes.keys()


def test_what_is_left_out_has_no_factors(folder):
    adapter = peft_adapter(folder, AdapterConfig(rank=4, exclude_modules=("experts", "gate")), seed=0)
    assert len(adapter.layers) == 4


def test_gate_and_up_without_down_are_refused_by_name(folder):
    with pytest.raises(ModelError, match=r"none for model\.layers\.0\.mlp\.experts\.gate_up_proj without one for down"):
        peft_adapter(folder, AdapterConfig(rank=4, exclude_modules=("down_proj",)), seed=0)


@pytest.mark.parametrize("name", ["A", "B"])
def test_factors_of_experts_are_taken_apart_and_put_together(name):
    together = torch.arange(4 * 3 * 5).view(12, 5) if name == "A" else torch.arange(60).view(5, 12)
    assert torch.equal(join_experts(split_experts(together, 4, name), name), together)
