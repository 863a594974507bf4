"""Early check of evaluate stages: finds mistakes in tasks and a missing chat template before the model is trained."""

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
from stages.rewards.judging import opening_problems
from stages.rewards.reward import RewardContext
from stages.serving.config import ServingConfig, limit_problems
from stages.serving.engine import limits_of


def check(stage_input: StageInput) -> Iterator[tuple[str, LifecycleError | str]]:
    """Yield an evaluate stage's errors by dotted config field; a text names what could not be checked."""
    config = EvaluateConfig.model_validate(stage_input.config)
    if config.episodes:
        context = RewardContext(stage_input.inputs, stage_input.cache, lambda _: None)
        found = opening_problems(config.episodes.rewards, context)
        yield from ((f"episodes.rewards.{name}", error) for name, error in found)
        if broken := list(config.episodes.environment.opening_problems()):
            yield from (("episodes.environment", error) for error in broken)
            return  # its tools are part of the prompts
    artifact = stage_input.inputs[config.model]
    model = next((folder for folder in (artifact / ADAPTER_FOLDER, artifact / "model") if folder.is_dir()), None)
    try:
        if config.apply_chat_template and model:  # the artifact of a serve stage has none
            check_chat_template(model)
    except LifecycleError as error:
        yield "apply_chat_template", error
    else:
        yield from _tasks(config, model, stage_input)
    try:
        yield from _beyond_the_model(config, stage_input)
    except LifecycleError as error:
        yield "model", error


def _tasks(
    config: EvaluateConfig, model: Path | None, stage_input: StageInput
) -> Iterator[tuple[str, LifecycleError | str]]:
    """Try an evaluation's tasks without a server: load them, and render and score their first samples."""
    base, limits = stage_input.inputs[config.base or config.model] / "model", None
    if base.is_dir():  # a serve stage's limits are its own
        limits = limits_of(base, {base, model or base}, config.serving or ServingConfig())
    as_chat = config.apply_chat_template
    if as_chat is None:  # if training changes it, the evaluation itself finds faults of the chat's rendering
        as_chat = model is not None and is_asked_as_chat(model)
    evaluation = replace(config.evaluation, apply_chat_template=as_chat)
    if limits:
        evaluation = replace(evaluation, max_images=limits.most, media_kinds=limits.kinds)
    try:
        unseen = harness_of(evaluation).check(evaluation, stage_input.cache, model, base if base.is_dir() else None)
        yield from [("tasks", unseen)] if unseen else []
    except LifecycleError as error:
        yield "tasks", error


def _beyond_the_model(config: EvaluateConfig, stage_input: StageInput) -> Iterator[tuple[str, LifecycleError]]:
    """Yield errors for settings of the evaluate stage's own server that the model's config does not allow."""
    if config.serving:
        facts = ModelFacts(stage_input.inputs[config.base or config.model] / "model")
        for field, message in limit_problems(facts, config.serving, None, os.environ):
            yield field, RecipeError(message)


def check_chat_template(model: Path) -> None:
    """Raise EvaluationError if a model folder has no chat template."""
    if not has_chat_template(model):
        raise EvaluationError(
            f"the questions are to be those of a chat, but {model} has no chat template (chat_template.jinja, or in "
            "tokenizer_config.json); say `apply_chat_template: false`, or evaluate a model that has one"
        )
