"""Early check of serve stages: finds settings that the model's config does not allow before the model is trained."""

import os
from collections.abc import Iterator, Mapping
from pathlib import Path

from stages.core.contract import StageInput
from stages.core.errors import LifecycleError, RecipeError
from stages.kinds.serve.config import ServeConfig
from stages.models.carried_weights import holds_mtp
from stages.models.facts import ModelFacts
from stages.serving.config import limit_problems
from stages.serving.registry import check_sees, chosen_engine


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
    try:
        check_sees(folder, chosen_engine(config.serving))
    except LifecycleError as error:
        yield "serving.engine", error
    if config.speculation_method:
        yield from _speculation_problems(config, stage_input.inputs, folder)


def _speculation_problems(
    config: ServeConfig, inputs: Mapping[str, Path], folder: Path
) -> Iterator[tuple[str, LifecycleError]]:
    """Yield an error if the model in `folder` has no MTP layers to guess with, or the draft model other tokens."""
    if config.speculative == "mtp" and not holds_mtp(folder):
        problem = "mtp, but the model's files hold no layers of multi-token prediction; say ngram, or {draft: STAGE}"
        yield "speculative", RecipeError(problem)
    if config.draft:
        served, own = (ModelFacts(one).fields.get("vocab_size") for one in (folder, inputs[config.draft] / "model"))
        if served != own:
            problem = f"{config.draft} has {own} tokens, the served model {served}; expected one with the same tokens"
            yield "speculative.draft", RecipeError(problem)
