"""Check of an evaluation: mistakes in its tasks, and in asking a model as a chat, found before the model is made."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from stages.adapters.headers import ADAPTER_FOLDER
from stages.core.contract import StageInput
from stages.core.errors import EvaluationError, LifecycleError, RecipeError
from stages.harnesses.registry import harness_of
from stages.kinds.evaluate.config import EvaluateConfig
from stages.models.facts import ModelFacts
from stages.models.recorded import has_chat_template, is_asked_as_chat
from stages.serving.config import limit_problems


def check(stage_input: StageInput) -> Iterator[tuple[str, LifecycleError | str]]:
    """Yield dotted field and error of an evaluation's config, or a text about what could not be checked."""
    config = EvaluateConfig.model_validate(stage_input.config)
    artifact = stage_input.inputs[config.model]
    model = next((folder for folder in (artifact / ADAPTER_FOLDER, artifact / "model") if folder.is_dir()), None)
    try:
        if config.apply_chat_template and model:  # the artifact of a serve stage has none
            check_chat_template(model)
    except LifecycleError as error:
        yield "apply_chat_template", error
    else:
        yield from _tasks(config, model, stage_input.cache)
    try:
        yield from _beyond_the_model(config, stage_input)
    except LifecycleError as error:
        yield "model", error


def _tasks(config: EvaluateConfig, model: Path | None, cache: Path) -> Iterator[tuple[str, LifecycleError | str]]:
    """Rehearse an evaluation's tasks: load them, render and score their first samples without a server."""
    as_chat = config.apply_chat_template
    if as_chat is None:  # if training changes it, the evaluation itself finds faults of the chat's rendering
        as_chat = model is not None and is_asked_as_chat(model)
    evaluation = replace(config.evaluation, apply_chat_template=as_chat)
    try:
        unseen = harness_of(evaluation).check(evaluation, cache, model)
        yield from [("tasks", unseen)] if unseen else []
    except LifecycleError as error:
        yield "tasks", error


def _beyond_the_model(config: EvaluateConfig, stage_input: StageInput) -> Iterator[tuple[str, LifecycleError]]:
    """Yield settings that the model rules out for a server of the stage's own; a serve stage checks its own."""
    if config.serving:
        facts = ModelFacts(stage_input.inputs[config.base or config.model] / "model")
        for field, message in limit_problems(facts, config.serving, None, os.environ):
            yield field, RecipeError(message)


def check_chat_template(model: Path) -> None:
    """Raise EvaluationError for a model folder without a chat template."""
    if not has_chat_template(model):
        raise EvaluationError(
            f"the questions are to be those of a chat, but {model} has no chat template (chat_template.jinja, or in "
            "tokenizer_config.json); say `apply_chat_template: false`, or evaluate a model that has one"
        )
