"""Benchmark of a running server: its engine puts load on it, random prompts with greedy answers of a fixed length."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from stages.core.errors import ServerError
from stages.serving.config import BenchmarkConfig
from stages.serving.engine import LoadResult
from stages.serving.server import Server


def measure(server: Server, benchmark: BenchmarkConfig, folder: Path, warn: Callable[[str], None]) -> dict[str, float]:
    """Return the medians of time to first token and between tokens, and the throughput, as `METRIC_concurrency_N`.

    The time between tokens is left out, with a warning, when answers were shorter than requested, or had one token.
    Leaves `benchmark.json` (the full results) and `benchmark.log` in `folder`. Raises ServerError when a request fails.
    """
    metrics: dict[str, float] = {}
    for load in server.engine.generate_load(server.client, server.spec, benchmark, folder):
        if load.num_failed:
            raise ServerError(
                f"{load.num_failed} of {load.num_requests} requests failed under {load.concurrency} at a time; "
                f"see {folder / 'benchmark.log'} and {server.log_file}"
            )
        metrics[f"ttft_ms_concurrency_{load.concurrency}"] = load.ttft_ms
        unmeasured = _why_unmeasured(load, benchmark)
        if unmeasured:
            warn(f"inter-token latency under {load.concurrency} at a time: not measured, since {unmeasured}")
        else:
            metrics[f"inter_token_latency_ms_concurrency_{load.concurrency}"] = load.inter_token_latency_ms
        metrics[f"output_tokens_per_s_concurrency_{load.concurrency}"] = load.output_tokens_per_s
    return metrics


def _why_unmeasured(load: LoadResult, benchmark: BenchmarkConfig) -> str | None:
    """Return why the time between tokens could not be measured; None if it was."""
    if benchmark.output_tokens == 1:
        return "benchmark.output_tokens is 1: an answer of one token has no time between tokens"
    expected = load.num_requests * benchmark.output_tokens
    if load.num_output_tokens < expected:
        return f"the answers had {load.num_output_tokens} tokens in all, expected {expected}"
    return None
