"""What no server can hold of what a recipe asks of it, known from the model's `config.json` alone."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from stages.core.errors import ModelError
from stages.models.config_check import check_config
from stages.models.model_config import SPELLINGS, shape_of_config
from stages.serving.config import BenchmarkConfig, ServingConfig

LONG_IN_THEMSELVES = ("longrope", "su", "llama3", "default", "mrope")
"""Kinds of rotary embedding whose `max_position_embeddings` already is what they extend a model to."""
MAY_BE_TOO_LONG = "VLLM_ALLOW_LONG_MAX_MODEL_LEN"
BYTES_PER_GIB = 2**30


def limit_problems(
    model_config: Mapping[str, Any],
    serving: ServingConfig,
    benchmark: BenchmarkConfig | None,
    environment: Mapping[str, str],
) -> Iterator[tuple[str, str]]:
    """Dotted field of the stage, and what is wrong with it. environment: of the server.

    Raises ModelError for a config that no model has.
    """
    check_config(dict(model_config), "its config")
    fields = {**model_config, **(model_config.get("text_config") or {})}
    max_tokens = _max_tokens(fields)
    if max_tokens is not None and environment.get(MAY_BE_TOO_LONG) != "1":
        yield from _too_long(serving, benchmark, max_tokens)
    yield from _undivided(fields, serving.tensor_parallel_size)
    tokens = serving.max_model_len or max_tokens
    if tokens and serving.kv_cache_memory_gib:
        yield from _too_little_memory(fields, serving, serving.kv_cache_memory_gib, tokens)


def _too_long(serving: ServingConfig, benchmark: BenchmarkConfig | None, max_tokens: int) -> Iterator[tuple[str, str]]:
    if serving.max_model_len and serving.max_model_len > max_tokens:
        found = f"{serving.max_model_len}, but the model has {max_tokens} positions; lower it"
        yield "serving.max_model_len", found
    if benchmark and benchmark.tokens > max_tokens:
        yield (
            "benchmark",
            f"input_tokens and output_tokens are {benchmark.tokens} together, but the model has {max_tokens} "
            "positions; lower them",
        )


def _undivided(fields: Mapping[str, Any], ranks: int) -> Iterator[tuple[str, str]]:
    """Tensor parallelism gives every rank whole heads, and the same share of each feed-forward layer."""
    queries = next((fields[name] for name in SPELLINGS["num_heads"] if fields.get(name)), 0)
    keys = fields.get("num_key_value_heads") or queries
    field = "serving.tensor_parallel_size"
    if isinstance(keys, int) and (queries % ranks or (keys % ranks and ranks % keys)):
        yield (
            field,
            f"{ranks} ranks, but the model's {queries} attention heads ({keys} of keys) cannot be divided between "
            f"them; {_divisors(queries, keys)} can",
        )
    width = fields.get("intermediate_size")
    is_mixture = any(fields.get(name) for name in (*SPELLINGS["num_experts"], "n_routed_experts"))
    if isinstance(width, int) and width % ranks and not is_mixture:
        yield field, f"{ranks} ranks, which do not divide the model's feed-forward width of {width}"


def _divisors(queries: int, keys: int) -> str:
    good = [n for n in range(1, min(queries, 64) + 1) if not queries % n and (not keys % n or not n % keys)]
    return " or ".join(map(str, good))


def _too_little_memory(
    fields: Mapping[str, Any], serving: ServingConfig, gib: float, tokens: int
) -> Iterator[tuple[str, str]]:
    """An engine refuses to start without room for one request of the greatest length."""
    try:
        shape = shape_of_config(fields)
    except ModelError:  # of a family whose sizes are not known
        return
    if shape.sliding_window:
        return
    heads = max(1, shape.num_kv_heads // serving.tensor_parallel_size)
    bytes_per_value = 4 if serving.dtype == "float32" else 2
    needed = 2 * shape.num_layers * heads * shape.head_dim * bytes_per_value * tokens / BYTES_PER_GIB
    if needed > gib:
        yield (
            "serving.kv_cache_memory_gib",
            f"{gib:g}, but a request of {tokens} tokens, the most that the server is to take, needs {needed:.3g} GiB; "
            "raise it, or lower serving.max_model_len",
        )


def _max_tokens(fields: Mapping[str, Any]) -> int | None:
    """What the model can attend to, as vLLM derives it: `max_position_embeddings`, stretched by the factor of the
    rotary embedding; None where the config does not say."""
    positions = fields.get("max_position_embeddings")
    rope = fields.get("rope_parameters") or fields.get("rope_scaling") or {}
    kind = rope.get("rope_type") or rope.get("type") or "default"
    if not isinstance(positions, int):
        return None
    if kind in LONG_IN_THEMSELVES:
        return positions
    if kind == "yarn":
        positions = rope.get("original_max_position_embeddings") or positions
    return int(positions * (rope.get("factor") or 1.0))
