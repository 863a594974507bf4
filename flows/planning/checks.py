"""Checks of a plan before anything runs: idle fields, gates, servers, quantization, publishing, installations."""

from __future__ import annotations

import functools
import os
import socket
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from flows.ledger.home import store_root
from flows.planning.model_shape import ModelConfigs, download_of
from flows.planning.plan import Plan
from flows.recipe.recipe import Recipe
from flows.recipe.text import show
from stages.core.contract import StageConfig
from stages.core.errors import LifecycleError, PublishError, RecipeError, TransientError
from stages.core.fields import values_named
from stages.harnesses.registry import harness_of
from stages.hubs.answers import PLANNING_LIMIT_S, Answers
from stages.kinds.evaluate.config import EvaluateConfig
from stages.kinds.promote.config import PromoteConfig
from stages.kinds.publish.config import PublishConfig
from stages.kinds.publish.targets.folder import Folder, check_outside
from stages.kinds.publish.targets.registry import parse_address, token_of
from stages.kinds.quantize.config import QuantizeConfig
from stages.kinds.serve.config import ServeConfig
from stages.models.model_config import shape_of_config
from stages.models.projections import projections_of
from stages.serving.config import ServingConfig
from stages.serving.limits import limit_problems
from stages.serving.own_parser import NotAsked
from stages.serving.registry import chosen_engine

SHARES = ("acc", "acc_norm", "exact_match")
"""Metrics of lm-eval that are means of 0 and 1."""
OFTEN_OVERRIDDEN = ("execution.", "epochs")
"""What somebody who tries a recipe for a few steps, or on one machine, need not take out of it."""


class Problems:
    """Errors in the order in which they were found; a text that was found twice counts once."""

    def __init__(self) -> None:
        self._errors: dict[str, LifecycleError] = {}

    @contextmanager
    def noted(self) -> Iterator[None]:
        """Note the error that a check raises, and go on."""
        try:
            yield
        except LifecycleError as error:
            self.add(error)

    def add(self, error: LifecycleError) -> None:
        """Note an error."""
        self._errors.setdefault(str(error), error)

    def check(self) -> None:
        """Raise what was noted: the error itself, or of several a RecipeError that lists them.

        Several of one class stay of that class. A source that does not answer counts only where nothing else is wrong:
        another attempt would find the other problems again.
        """
        errors = list(self._errors.values())
        if len(errors) == 1:
            raise errors[0]
        kinds = {type(error) for error in errors}
        kinds = kinds - {TransientError} or kinds
        if errors:
            raise (kinds.pop() if len(kinds) == 1 else RecipeError)("\n".join(self._errors))


def check_gates(recipe: Recipe, chosen: Collection[str]) -> None:
    """Raises `RecipeError` that lists the gates of these stages that ask for what nothing measures."""
    promotions = {name: config for name, config in recipe.stages.items() if isinstance(config, PromoteConfig)}
    problems = [
        f"stages.{name}.gates.{problem}"
        for name, config in promotions.items()
        if name in chosen
        for problem in [
            *_unmeasured_scores(config, recipe),
            *_beyond_a_share(config, recipe),
            *_unmeasured_throughput(config, recipe),
        ]
    ]
    if problems:
        raise RecipeError("\n".join(problems))


def _unmeasured_scores(config: PromoteConfig, recipe: Recipe) -> Iterator[str]:
    stages = [recipe.stages[name] for name in config.evaluations]
    evaluations = [stage.evaluation for stage in stages if isinstance(stage, EvaluateConfig)]
    for field, bounds in (("min_scores", config.gates.min_scores), ("max_scores", config.gates.max_scores)):
        for score in bounds:
            if not any(harness_of(evaluation).may_give(score, evaluation) for evaluation in evaluations):
                tasks = ", ".join(task for evaluation in evaluations for task in evaluation.tasks)
                yield (
                    f"{field}: no evaluation gives the score {score}; the tasks are {tasks}, and their scores are "
                    "called TASK.METRIC, or TASK.FILTER.METRIC where the task has filters"
                )


def _beyond_a_share(config: PromoteConfig, recipe: Recipe) -> Iterator[str]:
    """Bounds of shares that are meant in percent, or that none misses; code of a person's own may give such scores in
    any way."""
    stages = [recipe.stages[name] for name in config.evaluations]
    if any(isinstance(stage, EvaluateConfig) and stage.trust_task_code for stage in stages):
        return
    for field, bounds, free in (("min_scores", config.gates.min_scores, 0), ("max_scores", config.gates.max_scores, 1)):
        for score, bound in bounds.items():
            if score.rpartition(".")[2] in SHARES and (bound == free or not 0 <= bound <= 1):
                advice = ", which nothing misses; be stricter, or remove it" if bound == free else "; say 0.4 for 40%"
                yield f"{field}: {score} is a share, from 0 to 1, and the bound is {bound:g}{advice}"


def _unmeasured_throughput(config: PromoteConfig, recipe: Recipe) -> Iterator[str]:
    server = recipe.stages[config.server] if config.server else None
    if config.gates.min_output_tokens_per_s and isinstance(server, ServeConfig) and server.benchmark is None:
        yield f"min_output_tokens_per_s: {config.server} has no `benchmark`, which measures it; give it one"


def check_idle(recipe: Recipe, chosen: Collection[str]) -> list[str]:
    """What these stages say without effect and may go on saying, a sentence each.

    Raises `RecipeError` that lists all else that has none.
    """
    found = [(name, *one) for name, config in recipe.stages.items() if name in chosen for one in _idle(config)]
    problems = [
        f"stages.{name}.{path}: {value} does nothing: {why}; remove it"
        for name, path, value, why in found
        if not path.startswith(OFTEN_OVERRIDDEN)
    ]
    if problems:
        raise RecipeError("\n".join(problems))
    return [f"{name}: `{path}: {value}` does nothing: {why}" for name, path, value, why in found]


def _idle(config: StageConfig) -> Iterator[tuple[str, str, str]]:
    """Path, value and reason of each idle field that is set; one that has its default counts as unset."""
    said = config.model_dump(mode="json", exclude_defaults=True)
    for path, why in dict(config.idle_fields()).items():
        *blocks, field = path.split(".")
        block: dict[str, Any] = functools.reduce(lambda tree, name: tree.get(name, {}), blocks, said)
        if field in block:
            yield path, show(block[field]), why


def check_serving(recipe: Recipe, chosen: Collection[str], configs: ModelConfigs, *, at_once: bool) -> list[str]:
    """Raises `RecipeError` that lists what these stages' servers cannot listen on, hold or be started with.

    at_once: what an engine takes seconds to know is left to a run. Notes name what is, and what cannot be known here.
    """
    servers = {
        name: config
        for name, config in recipe.stages.items()
        if name in chosen and isinstance(config, ServeConfig | EvaluateConfig)
    }
    problems = [
        f"stages.{name}.{problem}"
        for name, config in servers.items()
        for problem in [*_elsewhere(config), *_beyond_the_model(config, recipe, name, configs)]
    ]
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
    found = {
        field: chosen_engine(serving).argument_problems(arguments, at_once=at_once)
        for field, (serving, arguments) in asked.items()
    }
    known = {field: one for field, one in found.items() if not isinstance(one, NotAsked)}
    # A field of one option is not followed by the option's name again.
    problems += [
        f"{field}.{problem}" if field.endswith(".arguments") else f"{field}: {problem.partition(': ')[2]}"
        for field, one in known.items()
        for problem in one
    ]
    if problems:
        raise RecipeError("\n".join(problems))
    return [
        f"{field}: whether {chosen_engine(asked[field][0]).title} takes them {one.why}"
        for field, one in found.items()
        if isinstance(one, NotAsked)
    ]


def _elsewhere(config: ServeConfig | EvaluateConfig) -> Iterator[str]:
    """A host that this machine cannot listen on; that of a cluster's job is known there."""
    host = config.execution.host
    if config.execution.launcher != "local":
        return
    names = Answers[Any](PLANNING_LIMIT_S)
    names.ask(host, partial(socket.getaddrinfo, host, 0, type=socket.SOCK_STREAM))
    try:
        family = names.of(host)[0][0]
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.bind((host, 0))
    except OSError as error:
        expected = "expected an address of this machine, such as 127.0.0.1, or 0.0.0.0 for all"
        yield f"execution.host: cannot listen on {host}: {error.strerror}; {expected}"
    except TransientError:  # who knows the name is slow to answer; the server will ask again
        return


def _beyond_the_model(
    config: ServeConfig | EvaluateConfig, recipe: Recipe, stage: str, configs: ModelConfigs
) -> list[str]:
    """Nothing where the model's config cannot be read yet: the check after its download finds it."""
    benchmark = config.benchmark if isinstance(config, ServeConfig) else None
    try:
        model_config = configs.of(download_of(recipe, stage))
        environment = config.execution.environment
        found = limit_problems(model_config or {}, config.serving or ServingConfig(), benchmark, environment)
        return [f"{field}: {message}" for field, message in found]
    except LifecycleError:  # the download says so itself
        return []


def check_quantizing(recipe: Recipe, chosen: Collection[str], configs: ModelConfigs) -> None:
    """Raises `RecipeError` that lists the quantizations, of these stages, that could not be served.

    What a cluster does is left to it: its devices may take what those of this machine do not.
    """
    problems = []
    for name, config in recipe.stages.items():
        if name not in chosen or not isinstance(config, QuantizeConfig) or config.execution.launcher != "local":
            continue
        try:
            model_config = configs.of(download_of(recipe, name)) or {}
            layers = projections_of(shape_of_config(model_config))
        except LifecycleError:  # the download says so itself, or its headers will
            continue
        try:
            config.serving_engine.check_loadable(model_config, layers, config.quantization)
        except RecipeError as error:
            problems.append(f"stages.{name}.model: {error}")
    if problems:
        raise RecipeError("\n".join(problems))


def check_publishing(plan: Plan) -> None:
    """Raise `RecipeError` for stages that will run and whose target cannot take what they publish.

    Of a stage that a cluster runs, only the store is looked at, which it shares: its environment and its other folders
    are not known here, and the stage itself checks them there.
    """
    problems = []
    for name, stage in plan.stages.items():
        config = stage.config
        if isinstance(config, PublishConfig) and stage.action != "cached" and (problem := _problem(config)):
            problems.append(f"stages.{name}.to: {problem}")
    if problems:
        raise RecipeError("\n".join(problems))


def _problem(config: PublishConfig) -> str | None:
    address, is_local = parse_address(config.to), config.execution.launcher == "local"
    if address.scheme == "file":
        try:
            check_outside(Path(address.place), store_root())
            if is_local and not config.dry_run:
                Folder(Path(address.place)).check()
        except PublishError as error:
            return str(error)
    variable = token_of(address) if is_local and not config.dry_run else None
    if variable and not {**os.environ, **config.execution.environment}.get(variable):
        return (
            f"{config.to} is written to with a token, and the environment has no {variable}; set it, or say "
            "`dry_run: true`"
        )
    return None


def installation_notes(planned: Plan) -> Iterator[str]:
    """Of each evaluation that will run and whose harness is not there. Raises ResourceError where it cannot be made."""
    for name, stage in planned.stages.items():
        if stage.action != "run" or not isinstance(stage.config, EvaluateConfig):
            continue
        if missing := harness_of(stage.config.evaluation).to_install():
            yield f"{name}: {missing}"
