"""What is wrong with the tasks of an evaluation, and with asking a model as a chat, before the model is made."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from stages.adapters.headers import ADAPTER_FOLDER
from stages.core.contract import StageInput
from stages.core.errors import EvaluationError, LifecycleError, RecipeError
from stages.evaluate.config import EvaluateConfig
from stages.harnesses.registry import harness_of
from stages.models.model_config import read_config
from stages.models.trained_on import has_chat_template
from stages.serving.limits import limit_problems


def check(stage_input: StageInput) -> Iterator[tuple[str, LifecycleError]]:
    """Dotted field and error."""
    config = EvaluateConfig.model_validate(stage_input.config)
    try:
        harness_of(config.evaluation).prepare(config.evaluation, stage_input.cache)
    except LifecycleError as error:
        yield "tasks", error
    try:
        yield from _beyond_the_model(config, stage_input)
    except LifecycleError as error:
        yield "model", error
    try:
        if config.apply_chat_template:
            artifact = stage_input.inputs[config.model]
            adapter = artifact / ADAPTER_FOLDER
            check_chat_template(adapter if adapter.is_dir() else artifact / "model")
    except LifecycleError as error:
        yield "apply_chat_template", error


def _beyond_the_model(config: EvaluateConfig, stage_input: StageInput) -> Iterator[tuple[str, LifecycleError]]:
    """What a server of its own cannot hold; that of a serve stage is checked there."""
    if config.serving:
        model_config = read_config(stage_input.inputs[config.base or config.model] / "model")
        for field, message in limit_problems(model_config, config.serving, None, os.environ):
            yield field, RecipeError(message)


def check_chat_template(model: Path) -> None:
    """Raises EvaluationError for a model folder that has none."""
    if not has_chat_template(model):
        raise EvaluationError(
            f"the questions are to be those of a chat, but {model} has no chat template (chat_template.jinja, or in "
            "tokenizer_config.json); say `apply_chat_template: false`, or evaluate a model that has one"
        )
