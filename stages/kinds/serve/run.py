"""Serve stage: starts a model server, checks and benchmarks it, and keeps it running for later stages."""

import os
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NoReturn

from stages.core.contract import Lease, StageContext, StageResult
from stages.core.errors import ServerError
from stages.core.lines import counted
from stages.kinds.serve.config import ServeConfig
from stages.serving.agreement import agreement_metrics, compare_with_records
from stages.serving.config import BenchmarkConfig
from stages.serving.engine import LAUNCH_FILE, LoadResult
from stages.serving.registry import new_launch_spec
from stages.serving.served_models import adapter_folders
from stages.serving.server import Server, started_server

WATCH_INTERVAL_S = 0.5


def run(config: ServeConfig, context: StageContext) -> Iterator[StageResult]:
    """Serve a model: yield the result once the server is ready, then keep the server running until SIGTERM.

    Raises ModelError, ResourceError (port, no engine) before anything slow; ServerError when the server does not come
    up, fails the check, or ends while it is leased.
    """
    # SIGTERM is how a lease ends, so it is no failure. SystemExit leaves the context below, which ends the server.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    base = config.base or config.model
    spec = new_launch_spec(
        (context.inputs[base] / "model").resolve(),
        config.model,
        config.serving,
        adapters=adapter_folders(config.served_adapters, base, context.inputs),
        base_name=config.base,
        speculation=config.speculation(context.inputs),
    )
    # The server still writes its log and uses its folder after the artifact is complete, so neither lies in it.
    log_file = context.scratch / "server.log"
    runtime = context.cache / "servers" / f"{context.name}-{context.version}"
    with started_server(spec, config.execution, log_file, runtime) as server:
        metrics = _bring_up(server, config, context)
        shutil.copyfile(log_file, context.work / "server-start.log")
        (context.work / LAUNCH_FILE).write_text(spec.model_dump_json(indent=2))
        yield StageResult(
            metrics=metrics,
            tags=spec.version_tag,
            files=[LAUNCH_FILE, "server-start.log", *(["benchmark.json"] if config.benchmark else [])],
            lease=Lease(
                url=server.url, pid=os.getpid(), engine_folder=runtime.resolve() if server.address.socket else None
            ),
        )
        guard(server)  # runs from the time the lease begins, until SIGTERM


def _bring_up(server: Server, config: ServeConfig, context: StageContext) -> dict[str, float]:
    """Wait until the server is ready, check its answers and benchmark it; returns the metrics."""
    time_to_ready_s = server.wait_until_ready(
        config.execution.ready_timeout_s,
        lambda elapsed_s: context.doing(f"starting {server.engine.title}, {elapsed_s:.0f} s"),
    )
    context.milestone(f"{config.model} is served at {server.url} after {time_to_ready_s:.1f} s")
    context.doing("checking its answers")
    server.check()
    context_tokens = server.engine.context_tokens(server.client, server.spec)
    agreements = compare_with_records(
        server.client, server.spec, server.spec.folders, context_tokens, context.warn, address=server.address
    )
    for name, agreement in agreements.items():
        context.milestone(
            f"{name} differs from what training recorded by {agreement.from_training.most:.2g} nats per token at most "
            f"({counted(agreement.num_documents, 'document')})"
        )
    metrics = {"time_to_ready_s": time_to_ready_s, **agreement_metrics(agreements, config.model)}
    if config.benchmark:
        concurrencies = ", ".join(map(str, config.benchmark.concurrencies))
        context.doing(f"measuring under {concurrencies} requests at a time")
        metrics |= measure(server, config.benchmark, context.work, context.warn)
        context.milestone("measured " + ", ".join(f"{name} {value:.4g}" for name, value in metrics.items()))
    return metrics


def measure(server: Server, benchmark: BenchmarkConfig, folder: Path, warn: Callable[[str], None]) -> dict[str, float]:
    """Benchmark the model server; return times to first token and between tokens, and throughput, as metrics.

    Names end in `_concurrency_N`; latencies are medians. The engine's load is random prompts, with greedy answers of a
    fixed length; time between tokens is left out, with a warning, when answers were shorter, or had one token. A server
    that guesses tokens ahead also has the share of them that its model accepted. Leaves `benchmark.json` (full results)
    and `benchmark.log` in `folder`. Raises ServerError when a request fails.
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
        if load.accepted_fraction is not None:
            metrics[f"accepted_fraction_concurrency_{load.concurrency}"] = load.accepted_fraction
    return metrics


def _why_unmeasured(load: LoadResult, benchmark: BenchmarkConfig) -> str | None:
    """Return why a benchmark could not measure the time between tokens; None if it did."""
    if benchmark.output_tokens == 1:
        return "benchmark.output_tokens is 1: an answer of one token has no time between tokens"
    expected = load.num_requests * benchmark.output_tokens
    if load.num_output_tokens < expected:
        return f"the answers had {load.num_output_tokens} tokens in all, expected {expected}"
    return None


def guard(server: Server) -> NoReturn:
    """Wait as long as the server runs. Raises ServerError when the server ends by itself."""
    while server.alive():
        time.sleep(WATCH_INTERVAL_S)
    raise server.failure(f"at {server.url} ended by itself")
