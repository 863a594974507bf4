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
from stages.models.linear_layers import projections_of
from stages.models.model_config import shape_of_config
from stages.serving.config import ServingConfig, limit_problems
from stages.serving.engine import NotAsked
from stages.serving.registry import chosen_engine

SHARES = ("acc", "acc_norm", "exact_match")
"""Metrics of lm-eval that are means of 0 and 1."""
OFTEN_OVERRIDDEN = ("execution.", "epochs")
"""Fields that may have no effect: overrides for a short or local try of a recipe leave them there."""


class Problems:
    """Problems of a plan, collected over all checks, so that a person can fix them together.

    Errors keep the order in which they were found; equal texts count once.
    """

    def __init__(self) -> None:
        self._errors: dict[str, LifecycleError] = {}

    @contextmanager
    def noted(self) -> Iterator[None]:
        """Collect the error that a check raises, and continue."""
        try:
            yield
        except LifecycleError as error:
            self.add(error)

    def add(self, error: LifecycleError) -> None:
        """Add an error."""
        self._errors.setdefault(str(error), error)

    def check(self) -> None:
        """Raise the collected error, or of several a RecipeError that lists them.

        Several of one class stay of that class. A source that does not answer counts only when nothing else is wrong:
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
    """Raise `RecipeError` that lists the gates of these stages which no refresh could pass or could miss."""
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
    """Yield bounds of shares that are meant in percent, or that nothing misses.

    A person's own task code may give such scores in any range, so its tasks are not checked.
    """
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
    """Return a sentence for each field of these stages that has no effect and is often overridden.

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
    """Yield path, value and reason of each set field without effect; a field with its default counts as unset."""
    set_fields = config.model_dump(mode="json", exclude_defaults=True)
    for path, why in dict(config.idle_fields()).items():
        *blocks, field = path.split(".")
        block: dict[str, Any] = functools.reduce(lambda tree, name: tree.get(name, {}), blocks, set_fields)
        if field in block:
            yield path, show(block[field]), why


def check_serving(recipe: Recipe, chosen: Collection[str], configs: ModelConfigs, *, at_once: bool) -> list[str]:
    """Return notes on what cannot be known about these stages' servers here.

    at_once: leave out questions whose answer takes an engine seconds; a run asks them. Raises `RecipeError` that lists
    the servers that cannot listen, hold the model's context, or be started.
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
    answers = {
        field: chosen_engine(serving).argument_problems(arguments, at_once=at_once)
        for field, (serving, arguments) in asked.items()
    }
    known = {field: answer for field, answer in answers.items() if not isinstance(answer, NotAsked)}
    # A field of one option is not followed by the option's name again.
    problems += [
        f"{field}.{problem}" if field.endswith(".arguments") else f"{field}: {problem.partition(': ')[2]}"
        for field, answer in known.items()
        for problem in answer
    ]
    if problems:
        raise RecipeError("\n".join(problems))
    return [
        f"{field}: whether {chosen_engine(asked[field][0]).title} takes them {answer.why}"
        for field, answer in answers.items()
        if isinstance(answer, NotAsked)
    ]


def _elsewhere(config: ServeConfig | EvaluateConfig) -> Iterator[str]:
    """Yield a host that this machine cannot listen on; that of a cluster's job is known only there."""
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
    except TransientError:  # the name server is slow to answer; the model's server will ask it again
        return


def _beyond_the_model(
    config: ServeConfig | EvaluateConfig, recipe: Recipe, stage: str, configs: ModelConfigs
) -> list[str]:
    """Return the limits that exceed the model's.

    Empty where the model's config cannot be read yet: the check after its download finds it.
    """
    benchmark = config.benchmark if isinstance(config, ServeConfig) else None
    try:
        model_config = configs.of(download_of(recipe, stage))
        environment = config.execution.environment
        problems = limit_problems(model_config or {}, config.serving or ServingConfig(), benchmark, environment)
        return [f"{field}: {message}" for field, message in problems]
    except LifecycleError:  # the download reports it
        return []


def check_quantizing(recipe: Recipe, chosen: Collection[str], configs: ModelConfigs) -> None:
    """Raise `RecipeError` that lists the quantizations of these stages that could not be served.

    They follow from the model's config; what only the headers of its files show is found after its download. Stages on
    a cluster are not checked: its devices may accept what those of this machine do not.
    """
    problems = []
    for name, config in recipe.stages.items():
        if name not in chosen or not isinstance(config, QuantizeConfig) or config.execution.launcher != "local":
            continue
        try:
            model_config = configs.of(download_of(recipe, name)) or {}
            layers = projections_of(shape_of_config(model_config))
        except LifecycleError:  # the download, or the check of its headers, reports it
            continue
        try:
            config.serving_engine.check_loadable(model_config, layers, config.quantization)
        except RecipeError as error:
            problems.append(f"stages.{name}.model: {error}")
    if problems:
        raise RecipeError("\n".join(problems))


def check_publishing(plan: Plan) -> None:
    """Raise `RecipeError` for stages that will run and whose target cannot take what they publish.

    Reads the environment and looks at folders of this machine; asks no server. Of a stage on a cluster only the store
    is checked, which the cluster shares; its environment and other folders are checked there by the stage itself.
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
            f"{config.to} is written to with a token, and the environment has no {variable}; set it, or set "
            "`dry_run: true`"
        )
    return None


def installation_notes(planned: Plan) -> Iterator[str]:
    """Yield what harnesses of evaluations that will run install first: minutes, network and space.

    Raises ResourceError where the environment cannot be made.
    """
    for name, stage in planned.stages.items():
        if stage.action != "run" or not isinstance(stage.config, EvaluateConfig):
            continue
        if missing := harness_of(stage.config.evaluation).to_install():
            yield f"{name}: {missing}"
