"""Early check of serve stages: finds settings that the model's config does not allow before the model is trained."""

from __future__ import annotations

import os
from collections.abc import Iterator

from stages.core.contract import StageInput
from stages.core.errors import LifecycleError, RecipeError
from stages.kinds.serve.config import ServeConfig
from stages.models.facts import ModelFacts
from stages.serving.config import limit_problems


def check(stage_input: StageInput) -> Iterator[tuple[str, LifecycleError]]:
    """Yield a serve stage's errors by dotted config field; the model may be the one that training starts from."""
    config = ServeConfig.model_validate(stage_input.config)
    folder = stage_input.inputs[config.base or config.model] / "model"
    try:
        problems = [*limit_problems(ModelFacts(folder), config.serving, config.benchmark, os.environ)]
    except LifecycleError as error:
        yield "model", error
    else:
        yield from ((field, RecipeError(message)) for field, message in problems)
