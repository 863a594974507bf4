"""Servers that cannot hold what a recipe asks of them, found before anything runs instead of after all training."""

from __future__ import annotations

import socket
from collections.abc import Collection, Iterator, Mapping
from typing import Any

from flows.planning.model_shape import config_of_download, download_of
from flows.planning.outside import Outside
from flows.recipe.recipe import Recipe
from flows.store.record import Index
from stages.core.errors import LifecycleError, RecipeError
from stages.evaluate.config import EvaluateConfig
from stages.models.config_check import check_config
from stages.serve.config import ServeConfig

LONG_IN_THEMSELVES = ("longrope", "su", "llama3", "default", "mrope")
"""Kinds of rotary embedding whose `max_position_embeddings` already is what they extend a model to."""
MAY_BE_TOO_LONG = "VLLM_ALLOW_LONG_MAX_MODEL_LEN"


def check_serving(recipe: Recipe, chosen: Collection[str], outside: Outside, index: Index) -> None:
    """Raises `RecipeError` that lists the addresses and lengths of these stages' servers that cannot be."""
    servers = {
        name: config
        for name, config in recipe.stages.items()
        if name in chosen and isinstance(config, ServeConfig | EvaluateConfig)
    }
    problems = [
        f"stages.{name}.{problem}"
        for name, config in servers.items()
        for problem in [*_elsewhere(config), *_too_long(config, _max_tokens(recipe, name, outside, index))]
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


def _too_long(config: ServeConfig | EvaluateConfig, max_tokens: int | None) -> Iterator[str]:
    if max_tokens is None or config.execution.environment.get(MAY_BE_TOO_LONG) == "1":
        return
    serving = config.serving
    if serving and serving.max_model_len and serving.max_model_len > max_tokens:
        yield f"serving.max_model_len: {serving.max_model_len}, but the model has {max_tokens} positions; lower it"
    if isinstance(config, ServeConfig) and config.benchmark and config.benchmark.tokens > max_tokens:
        yield (
            f"benchmark: input_tokens and output_tokens are {config.benchmark.tokens} together, but the model has "
            f"{max_tokens} positions; lower them"
        )


def _max_tokens(recipe: Recipe, stage: str, outside: Outside, index: Index) -> int | None:
    """What the model can attend to; None where its config does not say, or cannot be read yet."""
    try:
        config = config_of_download(recipe, download_of(recipe, stage), outside, index)
        check_config(config or {}, "its config")
    except LifecycleError:  # the download says so itself
        return None
    return _positions({**config, **(config.get("text_config") or {})}) if config else None


def _positions(config: Mapping[str, Any]) -> int | None:
    """As vLLM derives it: `max_position_embeddings`, stretched by the factor of the rotary embedding."""
    positions = config.get("max_position_embeddings")
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    kind = rope.get("rope_type") or rope.get("type") or "default"
    if not isinstance(positions, int):
        return None
    if kind in LONG_IN_THEMSELVES:
        return positions
    if kind == "yarn":
        positions = rope.get("original_max_position_embeddings") or positions
    return int(positions * (rope.get("factor") or 1.0))
