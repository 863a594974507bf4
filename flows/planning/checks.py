"""Checks of a recipe and plan before anything runs: fields without effect, server options, each stage's own checks."""

import functools
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from flows.ledger.home import home, store_root
from flows.planning.model_shape import ModelConfigs, download_of
from flows.planning.plan import Plan
from flows.recipe.recipe import Recipe
from flows.recipe.text import show
from flows.store.remote import job_store
from stages.core.contract import StageConfig
from stages.core.errors import LifecycleError, RecipeError, TransientError
from stages.core.fields import values_named
from stages.serving.engine import UncheckedOptions
from stages.serving.registry import chosen_engine

OFTEN_OVERRIDDEN = ("execution.", "epochs")
"""Config fields that trial runs often override, so that they may be without effect: only a warning, not an error."""


class Problems:
    """Collector of all problems found in a plan, in order, so that a person can fix them in one go."""

    def __init__(self, errors: Iterable[LifecycleError] = ()) -> None:
        self._errors: dict[str, LifecycleError] = {str(error): error for error in errors}

    @contextmanager
    def noted(self) -> Iterator[None]:
        """Collect the error that the `with` block raises instead of raising it, and continue after the block."""
        try:
            yield
        except LifecycleError as error:
            self.add(error)

    def add(self, error: LifecycleError) -> None:
        """Add an error to the collected problems; an equal message counts once."""
        self._errors.setdefault(str(error), error)

    def check(self) -> None:
        """Raise the collected problem; several problems are raised as one error that lists all.

        Several of one class stay of that class. A source that does not answer counts only when nothing else is wrong:
        another attempt would find the other problems again.
        """
        errors = list(self._errors.values())
        if len(errors) == 1:
            raise errors[0]
        kinds = {type(error) for error in errors}
        # Only where something else is wrong, too; else the set would be empty.
        kinds = kinds - {TransientError} or kinds
        if errors:
            raise (kinds.pop() if len(kinds) == 1 else RecipeError)("\n".join(self._errors))


def check_among(recipe: Recipe, chosen: Collection[str]) -> None:
    """Raise RecipeError for problems between stages of a recipe, such as a gate that no evaluated model can pass."""
    problems = [
        f"stages.{name}.{problem}"
        for name, config in recipe.stages.items()
        if name in chosen
        for problem in config.planned_problems(recipe.stages)
    ]
    if problems:
        raise RecipeError("\n".join(problems))


def check_idle(recipe: Recipe, chosen: Collection[str]) -> list[str]:
    """Return warnings about fields without effect that trial runs often override (`execution.*`, `epochs`).

    Raises `RecipeError` that lists all other fields without effect: who set one meant something else.
    """
    idle = [(name, *field) for name, config in recipe.stages.items() if name in chosen for field in _idle(config)]
    problems = [
        f"stages.{name}.{path}: {value} does nothing: {why}; remove it"
        for name, path, value, why in idle
        if not path.startswith(OFTEN_OVERRIDDEN)
    ]
    if problems:
        raise RecipeError("\n".join(problems))
    return [f"{name}: `{path}: {value}` does nothing: {why}" for name, path, value, why in idle]


def _idle(config: StageConfig) -> Iterator[tuple[str, str, str]]:
    """Yield the path, value and reason of each field that is set in a stage's config but has no effect."""
    set_fields = config.model_dump(mode="json", exclude_defaults=True)
    for path, why in dict(config.idle_fields()).items():
        *blocks, field = path.split(".")
        # `optimizer.momentum`: go down to the block that holds the field; {} where the block is not set.
        block: dict[str, Any] = functools.reduce(lambda tree, name: tree.get(name, {}), blocks, set_fields)
        if field in block:
            yield path, show(block[field]), why


def check_limits(recipe: Recipe, chosen: Collection[str], configs: ModelConfigs) -> None:
    """Raise RecipeError with every setting of the chosen stages that this machine or their models do not allow."""
    problems = [
        f"stages.{name}.{problem}"
        for name, config in recipe.stages.items()
        if name in chosen
        for problem in [
            *(f"execution.{problem}" for problem in config.execution.problems_here()),
            *_beyond_the_model(recipe, name, configs),
        ]
    ]
    if problems:
        raise RecipeError("\n".join(problems))


def _beyond_the_model(recipe: Recipe, stage: str, configs: ModelConfigs) -> list[str]:
    """Return what a stage asks for that its model does not allow; nothing if the model's config is unreadable."""

    def read_config() -> Mapping[str, Any]:
        facts = configs.of(download_of(recipe, stage))
        return facts.config if facts else {}

    try:
        return [*recipe.stages[stage].model_problems(read_config)]
    except LifecycleError:
        return []


def check_arguments(recipe: Recipe, chosen: Collection[str], *, at_once: bool) -> list[str]:
    """Check a recipe's options for inference servers; return notes on those that this machine cannot check.

    at_once: leave out questions whose answer takes an engine seconds; a run asks them. Raises `RecipeError` that lists
    the options that the engines do not take.
    """
    given = {
        f"stages.{name}.{path}": serving
        for name, config in recipe.stages.items()
        if name in chosen
        for path, serving in values_named(config, "serving")
        if serving
    }
    asked = {
        **{f"{path}.arguments": (serving, serving.arguments) for path, serving in given.items() if serving.arguments},
        **{
            f"{path}.tool_call_parser": (serving, {"tool-call-parser": serving.tool_call_parser})
            for path, serving in given.items()
            if serving.tool_call_parser
        },
    }
    answers = {
        field: chosen_engine(serving).argument_problems(arguments, at_once=at_once)
        for field, (serving, arguments) in asked.items()
    }
    known = {field: answer for field, answer in answers.items() if not isinstance(answer, UncheckedOptions)}
    # A field of one option is not followed by the option's name again.
    problems = [
        f"{field}.{problem}" if field.endswith(".arguments") else f"{field}: {problem.partition(': ')[2]}"
        for field, answer in known.items()
        for problem in answer
    ]
    if problems:
        raise RecipeError("\n".join(problems))
    return [
        f"{field}: whether {chosen_engine(asked[field][0]).title} takes them {answer.why}"
        for field, answer in answers.items()
        if isinstance(answer, UncheckedOptions)
    ]


def check_publishing(plan: Plan) -> None:
    """Raise RecipeError for publishing stages that will run, but whose target cannot take what they publish."""
    problems = [
        f"stages.{name}.{problem}"
        for name, stage in plan.stages.items()
        if stage.action != "cached"
        for problem in stage.config.target_problems(store_root())
    ]
    if problems:
        raise RecipeError("\n".join(problems))


def check_buckets(plan: Plan) -> None:
    """Raise RecipeError for stages that will run away from the home's disk without a bucket, or with secrets in it."""
    problems = Problems()
    for name, stage in plan.stages.items():
        if stage.action == "run":
            with problems.noted():
                job_store(name, stage.config, home())
    problems.check()


def installation_notes(planned: Plan) -> Iterator[str]:
    """Yield a note on each stage that will first install something, such as a serving engine."""
    for name, stage in planned.stages.items():
        if stage.action == "run" and (missing := stage.config.to_install()):
            yield f"{name}: {missing}"
