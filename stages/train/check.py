"""What is wrong with the data of a training stage, before the model that it starts from is made."""

from __future__ import annotations

from collections.abc import Iterator

from stages.core.contract import StageInput
from stages.core.errors import LifecycleError
from stages.data.check import data_problems
from stages.train.config import TrainConfig


def check(stage_input: StageInput) -> Iterator[tuple[str, LifecycleError]]:
    """Dotted field and error: splits, format, every row (as far as there is time), chat template, sequence length."""
    config = TrainConfig.model_validate(stage_input.config)
    problems = data_problems(
        stage_input.inputs[config.data.dataset] / "data",
        config.data,
        stage_input.inputs[config.model] / "model",
        rows=config.learning.rows,
        cache=stage_input.cache,
    )
    yield from ((f"data.{field}", error) for field, error in problems)
