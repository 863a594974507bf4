"""Early check of serve stages: finds settings that the model's config does not allow before the model is trained."""

import os
from collections.abc import Iterator, Mapping
from pathlib import Path

from stages.core.contract import StageInput
from stages.core.errors import LifecycleError, RecipeError
from stages.core.redaction import quoted
from stages.kinds.serve.config import ServeConfig
from stages.models.carried_weights import holds_mtp
from stages.models.facts import ModelFacts
from stages.models.model_folder import tokens_of
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
        draft = inputs[config.draft] / "model"
        served, own = (ModelFacts(one).fields.get("vocab_size") for one in (folder, draft))
        if served != own:
            problem = f"{config.draft} has {own} tokens, the served model {served}; expected one with the same tokens"
            yield "speculative.draft", RecipeError(problem)
        elif other := _other_token(folder, draft):
            problem = f"{config.draft} {other}: hardly a guess would be right; expected one with the same tokens"
            yield "speculative.draft", RecipeError(problem)


def _other_token(folder: Path, draft: Path) -> str | None:
    """Return how a draft model's tokens differ from the served model's; None where they do not, or no file says it.

    A token that one of them lacks is never guessed or never accepted, and does no harm.
    """
    served, own = tokens_of(folder), tokens_of(draft)
    if not served or not own:
        return None
    common = served.keys() & own.keys()
    if not common:
        return "has none of the served model's tokens"
    moved = [token for token in common if own[token] != served[token]]
    if not moved:
        return None
    first = min(moved, key=served.__getitem__)
    return f"has {quoted(first, 40)} as token {own[first]}, and the served model as {served[first]}"
