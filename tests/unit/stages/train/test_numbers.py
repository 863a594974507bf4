"""Numbers that would vanish, overflow or never take effect are refused when the recipe is read."""

from __future__ import annotations

from typing import Annotated, Any

import pytest
from pydantic import BaseModel, TypeAdapter, ValidationError

from stages.adapters.config import AdapterConfig
from stages.merge.config import MergeConfig
from stages.train.config import TrainConfig
from stages.train.methods.dpo import DpoConfig
from stages.train.methods.simpo import SimpoConfig
from tests.train_stage import make_config


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"seed": 2**63}, "less than or equal to 9223372036854775807"),
        ({"seed": -1}, "greater than or equal to 0"),
        ({"epochs": 1e-9}, "greater than or equal to 0.0001"),
        ({"epochs": float("inf")}, "finite number"),
        ({"learning_rate": 1e-40}, "greater than or equal to 0.000000000001"),
        ({"learning_rate": float("nan")}, "greater than or equal to 0.000000000001|finite number"),
        ({"learning_rate": float("inf")}, "finite number"),
        ({"max_grad_norm": 1e-40}, "greater than or equal to 0.000000000001"),
        ({"max_grad_norm": float("inf")}, "finite number"),
        ({"adam_epsilon": 1e-50}, "greater than or equal to 0.0000"),
        ({"weight_decay": float("inf")}, "finite number"),
        (
            {"weight_decay": 1000.0, "learning_rate": 1e-3},
            "`weight_decay: 1000` × `learning_rate: 0.001` .*less than 1",
        ),
        ({"steps": 10, "warmup_steps": 11}, "`warmup_steps: 11` is more than `steps: 10`"),
    ],
)
def test_is_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        make_config(**fields)


@pytest.mark.parametrize(
    ("config", "fields"),
    [
        (DpoConfig, ("beta", "discopop_tau", "label_smoothing", "loss_weights")),
        (SimpoConfig, ("beta", "gamma")),
        (AdapterConfig, ("alpha", "dropout", "loraplus_lr_ratio")),
        (MergeConfig, ("density", "weights")),
        (TrainConfig, ("adam_beta1", "adam_beta2", "adam_epsilon", "learning_rate", "max_grad_norm")),
        (TrainConfig, ("min_learning_rate_fraction", "weight_decay")),
    ],
)
def test_every_number_is_one_that_fp32_holds(config: type[BaseModel], fields: tuple[str, ...]) -> None:
    """By the type of each field alone, so that nothing else of the config can be what refuses it."""
    for name in fields:
        field = config.model_fields[name]
        adapter = TypeAdapter(Annotated[field.annotation, field])
        for number in (1e-46, 1e39):
            with pytest.raises(ValidationError, match=r"too (small|large) for fp32|or equal to|less than"):
                adapter.validate_python((number,) if "weights" in name else number)


def test_the_ends_of_what_is_meant_are_taken() -> None:
    make_config(seed=2**63 - 1, epochs=1e-4, learning_rate=1e-12, max_grad_norm=1e-12, steps=10, warmup_steps=10)
    make_config(max_grad_norm=None)
