"""Servers that cannot hold what a recipe asks of them, found before anything runs instead of after all training."""

from __future__ import annotations

import socket
from collections.abc import Collection, Iterator
from functools import partial
from typing import Any

from flows.planning.model_shape import ModelConfigs, download_of
from flows.recipe.recipe import Recipe
from stages.core.errors import LifecycleError, RecipeError, TransientError
from stages.core.fields import values_named
from stages.hubs.answers import PLANNING_LIMIT_S, Answers
from stages.kinds.evaluate.config import EvaluateConfig
from stages.kinds.serve.config import ServeConfig
from stages.serving.config import ServingConfig
from stages.serving.limits import limit_problems
from stages.serving.own_parser import NotAsked
from stages.serving.registry import chosen_engine


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
