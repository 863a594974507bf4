"""Adapter options that Megatron does not support are refused by name, including options added later."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from stages.adapters.config import AdapterConfig
from stages.kinds.train.checks import adapter_errors
from stages.kinds.train.config import TrainConfig
from stages.parallel.engines.megatron import MegatronRules

TRAIN = {
    "kind": "train",
    "method": "sft",
    "model": "base",
    "data": {"dataset": "rows"},
    "global_batch_size": 4,
    "learning_rate": 1e-3,
}


def test_what_is_honoured_exists():
    assert AdapterConfig.model_fields.keys() >= MegatronRules.adapter_options


def test_an_option_that_is_added_later_is_refused_by_name():
    class Later(AdapterConfig):
        new: float = 1.0

    assert not list(adapter_errors("megatron", Later()))
    assert not list(adapter_errors("fsdp", Later(new=2)))
    assert list(adapter_errors("megatron", Later(new=2))) == [
        "`adapter.new: 2.0` needs `engine: fsdp`, found megatron; change either"
    ]


def test_a_train_stage_says_so_when_its_recipe_is_read(monkeypatch):
    monkeypatch.setattr(MegatronRules, "adapter_options", MegatronRules.adapter_options - {"use_rslora"})
    adapter = {"rank": 4, "use_rslora": True}
    assert TrainConfig.model_validate({**TRAIN, "adapter": adapter}).adapter.use_rslora
    with pytest.raises(ValidationError, match=r"`adapter.use_rslora: true` needs `engine: fsdp`, found megatron"):
        TrainConfig.model_validate({**TRAIN, "engine": "megatron", "adapter": adapter})


def test_megatron_trains_adapters_with_what_it_honours():
    adapter = {"rank": 4, "alpha": 8, "dropout": 0.1, "target_modules": ["q_proj"], "layers_to_transform": [0]}
    config = TrainConfig.model_validate({**TRAIN, "engine": "megatron", "adapter": adapter})
    assert config.engine_settings.adapter.rank == 4


@pytest.mark.parametrize("precision", ["nf4", "int8"])
@pytest.mark.parametrize("layout", [{"tp": 2}, {"pp": 2}, {}])
def test_a_base_in_few_bits_is_refused_where_no_layout_could_spread_it(precision, layout):
    fields = {**TRAIN, "engine": "megatron", "layout": layout, "adapter": {"base_precision": precision}}
    with pytest.raises(ValidationError, match=rf"`adapter.base_precision: \"{precision}\"` needs `engine: fsdp`"):
        TrainConfig.model_validate(fields)
