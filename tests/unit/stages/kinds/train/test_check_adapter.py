"""Adapters that the model or the engine does not support are refused before training, with the config field."""

import pytest
from pydantic import ValidationError
from safetensors.torch import load_file, save_file
from transformers import Qwen3Config, Qwen3ForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

from stages.adapters.config import AdapterConfig
from stages.core.errors import ModelError
from stages.kinds.train.check import adapter_problems
from stages.kinds.train.config import TrainConfig
from stages.parallel.engines.megatron import MegatronRules
from stages.parallel.legality import adapter_errors

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
        ({"base_precision": "nf4"}, "inputs of model.layers.0.self_attn.q_proj, "),
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
    assert "stacks of matrices; set `adapter.base_precision: bf16`" in str(error)


def test_what_transformers_cannot_build_without_weights_is_said_to_be_unseen(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "their_own"}')
    ((field, found),) = problems(tmp_path, {})
    assert field == "adapter"
    assert isinstance(found, str)
    assert "could not be made: ValueError" in found


def test_what_is_honoured_exists():
    assert AdapterConfig.model_fields.keys() >= MegatronRules.adapter_options


def test_an_option_that_is_added_later_is_refused_by_name():
    class Later(AdapterConfig):
        new: float = 1.0

    assert not list(adapter_errors("megatron", Later().used_options))
    assert not list(adapter_errors("fsdp", Later(new=2).used_options))
    assert list(adapter_errors("megatron", Later(new=2).used_options)) == [
        "`adapter.new: 2.0` needs `engine: fsdp`, found megatron; change either"
    ]


def test_a_train_stage_says_so_when_its_recipe_is_read(monkeypatch):
    monkeypatch.setattr(MegatronRules, "adapter_options", MegatronRules.adapter_options - {"use_rslora"})
    adapter = {"rank": 4, "use_rslora": True}
    assert TrainConfig.model_validate({**FIELDS, "adapter": adapter}).adapter.use_rslora
    with pytest.raises(ValidationError, match=r"`adapter.use_rslora: true` needs `engine: fsdp`, found megatron"):
        TrainConfig.model_validate({**FIELDS, "engine": "megatron", "adapter": adapter})


def test_megatron_trains_adapters_with_what_it_honours():
    adapter = {"rank": 4, "alpha": 8, "dropout": 0.1, "target_modules": ["q_proj"], "layers_to_transform": [0]}
    config = TrainConfig.model_validate({**FIELDS, "engine": "megatron", "adapter": adapter})
    assert config.engine_settings.adapter.rank == 4


@pytest.mark.parametrize("precision", ["nf4", "int8"])
@pytest.mark.parametrize("layout", [{"tp": 2}, {"pp": 2}, {}])
def test_a_base_in_few_bits_is_refused_where_no_layout_could_spread_it(precision, layout):
    fields = {**FIELDS, "engine": "megatron", "layout": layout, "adapter": {"base_precision": precision}}
    with pytest.raises(ValidationError, match=rf"`adapter.base_precision: \"{precision}\"` needs `engine: fsdp`"):
        TrainConfig.model_validate(fields)
