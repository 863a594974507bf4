"""Measures a running server under load: random prompts, greedy answers of a fixed length. The engine has the means."""

from __future__ import annotations

from pathlib import Path

from stages.core.errors import ServerError
from stages.serving.config import BenchmarkConfig
from stages.serving.server import Server


def measure(server: Server, benchmark: BenchmarkConfig, folder: Path) -> dict[str, float]:
    """Median time to first token and between tokens, and throughput, as `METRIC_concurrency_N`.

    Leaves `benchmark.json` (the full results) and `benchmark.log` in `folder`. Raises ServerError when a request fails.
    """
    metrics: dict[str, float] = {}
    for load in server.engine.generate_load(server.client, server.spec, benchmark, folder):
        if load.num_failed:
            raise ServerError(
                f"{load.num_failed} of {load.num_requests} requests failed under {load.concurrency} at a time; "
                f"see {folder / 'benchmark.log'} and {server.log_file}"
            )
        metrics |= {
            f"ttft_ms_concurrency_{load.concurrency}": load.ttft_ms,
            f"inter_token_latency_ms_concurrency_{load.concurrency}": load.inter_token_latency_ms,
            f"output_tokens_per_s_concurrency_{load.concurrency}": load.output_tokens_per_s,
        }
    return metrics
