"""Numbers that would vanish, overflow or have no effect in fp32 are refused when the recipe is read."""

from collections.abc import Iterator
from typing import Annotated, Any, get_args

import pytest
from pydantic import BaseModel, TypeAdapter, ValidationError

from stages.core.fields import models_in
from stages.kinds.merge.config import MergeConfig
from stages.kinds.train.config import TrainConfig
from stages.kinds.train.methods.distill import DistillSampling
from stages.kinds.train.methods.grpo import GrpoConfig
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
        ({"global_batch_size": 10**18}, "less than or equal to 1048576"),
        ({"data": {"dataset": "problems", "sequence_length": 1}}, "greater than or equal to 2"),
    ],
)
def test_is_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        make_config(**fields)


NOT_COMPUTED_WITH = {
    TrainConfig: {"execution", "data", "epochs"},
    MergeConfig: {"execution", "max_difference"},
    GrpoConfig: {"rewards", "serving", "environment", "environments"},
    DistillSampling: {"serving"},
}
"""Fields whose numbers enter no computation in fp32, by config class: limits, shares, numbers of passes, a server's
options, and rewards, which are weighted in double precision."""


def is_number(annotation: Any) -> bool:
    return annotation is float or any(map(is_number, get_args(annotation)))


def numbers_of(config: type[BaseModel]) -> Iterator[tuple[type[BaseModel], str]]:
    """Yield the class and name of each config field that holds floating-point numbers, nested blocks included."""
    for name, field in config.model_fields.items():
        if name in NOT_COMPUTED_WITH.get(config, ()):
            continue
        if is_number(field.annotation):
            yield config, name
        for block in models_in(field.annotation):
            yield from numbers_of(block)


NUMBERS = [pair for config in NOT_COMPUTED_WITH for pair in numbers_of(config)]


def test_numbers_of_every_block_are_looked_at() -> None:
    blocks = {config.__name__ for config, _ in NUMBERS}
    assert blocks > {"TrainConfig", "MergeConfig", "AdapterConfig", "DpoConfig", "OrpoConfig", "CpoConfig", "KtoConfig"}


@pytest.mark.parametrize(("config", "name"), NUMBERS, ids=lambda value: getattr(value, "__name__", value))
def test_every_number_is_one_that_fp32_holds(config: type[BaseModel], name: str) -> None:
    """Every floating-point field, by its type alone, refuses numbers that fp32 cannot hold."""
    field = config.model_fields[name]
    adapter = TypeAdapter(Annotated[field.annotation, field])
    is_list = "tuple[" in str(field.annotation)
    for number in (1e-46, 1e39):
        with pytest.raises(ValidationError, match=r"too (small|large) for fp32|or equal to|less than"):
            adapter.validate_python((number,) if is_list else number)


def test_the_ends_of_what_is_meant_are_taken() -> None:
    make_config(seed=2**63 - 1, epochs=1e-4, learning_rate=1e-12, max_grad_norm=1e-12, steps=10, warmup_steps=10)
    make_config(max_grad_norm=None)
