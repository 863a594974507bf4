"""What is wrong with the data of a training stage, before the model that it starts from is made."""

from __future__ import annotations

from collections.abc import Iterator

from stages.core.contract import StageInput
from stages.core.errors import LifecycleError
from stages.data.check import data_problems
from stages.train.config import TrainConfig
from stages.train.start import data_with_template


def check(stage_input: StageInput) -> Iterator[tuple[str, LifecycleError | str]]:
    """Dotted field and error: splits, format, every row, chat template, sequence length; or what was not looked at."""
    config = TrainConfig.model_validate(stage_input.config)
    problems = data_problems(
        stage_input.inputs[config.data.dataset] / "data",
        data_with_template(config.data, stage_input.inputs[config.model]),
        stage_input.inputs[config.base or config.model] / "model",
        rows=config.learning.rows,
        cache=stage_input.cache,
    )
    yield from ((f"data.{field}", error) for field, error in problems)
