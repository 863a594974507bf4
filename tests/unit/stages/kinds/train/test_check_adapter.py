"""Adapters that a model cannot have are refused by field before training, on both engines."""

import pytest
from safetensors.torch import load_file, save_file
from transformers import Qwen3Config, Qwen3ForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

from stages.core.errors import ModelError
from stages.kinds.train.check import adapter_problems
from stages.kinds.train.config import TrainConfig

SIZES = {
    "vocab_size": 32,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "intermediate_size": 24,
}
FIELDS = {
    "kind": "train",
    "method": "sft",
    "model": "base",
    "data": {"dataset": "rows"},
    "global_batch_size": 4,
    "learning_rate": 1e-3,
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    Qwen3ForCausalLM(Qwen3Config(**SIZES)).save_pretrained(folder)
    return folder


def problems(folder, adapter, engine="fsdp"):
    config = TrainConfig.model_validate({**FIELDS, "engine": engine, "adapter": {"rank": 4, **adapter}})
    return list(adapter_problems(config, config.adapter, folder))


@pytest.mark.parametrize("engine", ["fsdp", "megatron"])
@pytest.mark.parametrize(
    ("adapter", "message"),
    [
        ({"target_modules": ["q_proj", "w1"]}, "target_modules names w1, which it does not have; its linear layers"),
        ({"target_modules": ".*attn.q"}, "matches none of its modules; linear layers are called down_proj"),
        ({"target_modules": ["embed_tokens"]}, "which adapts model.embed_tokens: only linear layers"),
        ({"target_modules": ["norm"]}, "is not supported; name linear layers"),
        ({"exclude_modules": ["w1"]}, "exclude_modules names w1"),
        ({"layers_to_transform": [2]}, "layers_to_transform names 2; its layers are 0 to 1"),
        ({"rank": 12}, "rank is 12, more than the width of model.layers.0.self_attn.k_proj (8)"),
    ],
)
def test_fields_that_both_engines_honour(folder, engine, adapter, message):
    ((field, error),) = problems(folder, adapter, engine)
    assert field == "adapter"
    assert isinstance(error, ModelError)
    assert message in str(error)


@pytest.mark.parametrize(
    ("adapter", "message"),
    [
        ({"modules_to_save": ["lm_haed"]}, "names lm_haed, which Qwen3ForCausalLM does not have; its modules are"),
        ({"base_precision": "nf4"}, "nf4, but model.layers.0.self_attn.q_proj.base_layer"),
    ],
)
def test_fields_of_fsdp(folder, adapter, message):
    ((_, error),) = problems(folder, adapter)
    assert message in str(error)


@pytest.mark.parametrize("adapter", [{}, {"init": "pissa"}, {"use_dora": True}, {"base_precision": "int8"}])
def test_nothing_is_said_of_what_can_be_trained(folder, adapter):
    assert not problems(folder, adapter)
    assert not problems(folder, {}, "megatron")


def test_the_files_are_looked_at_but_not_their_weights(folder, tmp_path):
    (tmp_path / "config.json").write_bytes((folder / "config.json").read_bytes())
    weights = load_file(folder / "model.safetensors")
    save_file({f"language_{name}": one for name, one in weights.items()}, tmp_path / "model.safetensors")
    ((_, error),) = problems(tmp_path, {})
    assert "of its weights have other names in the model's files" in str(error)


def test_a_mixture_is_not_kept_in_4_bits(tmp_path):
    config = Qwen3MoeConfig(**SIZES, num_experts=2, num_experts_per_tok=1, moe_intermediate_size=64)
    Qwen3MoeForCausalLM(config).save_pretrained(tmp_path)
    ((_, error),) = problems(tmp_path, {"base_precision": "nf4", "target_modules": ["q_proj"]})
    assert "mlp.experts.gate_up_proj" in str(error)
    assert "cannot be kept so" in str(error)


def test_what_transformers_cannot_build_without_weights_is_said_to_be_unseen(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "their_own"}')
    ((field, found),) = problems(tmp_path, {})
    assert field == "adapter"
    assert isinstance(found, str)
    assert "could not be made: ValueError" in found
