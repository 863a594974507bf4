"""Servers that cannot hold what a recipe asks of them, found before anything runs instead of after all training."""

from __future__ import annotations

import socket
from collections.abc import Collection, Iterator

from flows.planning.model_shape import config_of_download, download_of
from flows.planning.outside import Outside
from flows.recipe.recipe import Recipe
from flows.store.record import Index
from stages.core.errors import LifecycleError, RecipeError
from stages.evaluate.config import EvaluateConfig
from stages.serve.config import ServeConfig
from stages.serving.config import ServingConfig
from stages.serving.limits import limit_problems


def check_serving(recipe: Recipe, chosen: Collection[str], outside: Outside, index: Index) -> None:
    """Raises `RecipeError` that lists what these stages' servers cannot listen on or hold."""
    servers = {
        name: config
        for name, config in recipe.stages.items()
        if name in chosen and isinstance(config, ServeConfig | EvaluateConfig)
    }
    problems = [
        f"stages.{name}.{problem}"
        for name, config in servers.items()
        for problem in [*_elsewhere(config), *_beyond_the_model(config, recipe, name, outside, index)]
    ]
    if problems:
        raise RecipeError("\n".join(problems))


def _elsewhere(config: ServeConfig | EvaluateConfig) -> Iterator[str]:
    """A host that this machine cannot listen on; that of a cluster's job is known there."""
    host = config.execution.host
    if config.execution.launcher != "local":
        return
    try:
        family = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0][0]
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.bind((host, 0))
    except OSError as error:
        expected = "expected an address of this machine, such as 127.0.0.1, or 0.0.0.0 for all"
        yield f"execution.host: cannot listen on {host}: {error.strerror}; {expected}"


def _beyond_the_model(
    config: ServeConfig | EvaluateConfig, recipe: Recipe, stage: str, outside: Outside, index: Index
) -> list[str]:
    """Nothing where the model's config cannot be read yet: the check after its download finds it."""
    benchmark = config.benchmark if isinstance(config, ServeConfig) else None
    try:
        model_config = config_of_download(recipe, download_of(recipe, stage), outside, index)
        environment = config.execution.environment
        found = limit_problems(model_config or {}, config.serving or ServingConfig(), benchmark, environment)
        return [f"{field}: {message}" for field, message in found]
    except LifecycleError:  # the download says so itself
        return []
