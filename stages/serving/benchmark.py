"""Measures a running server under load with `vllm bench serve`: random prompts, greedy answers of a fixed length."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

from stages.core.errors import ServerError
from stages.serving.config import BenchmarkConfig
from stages.serving.launch import QUIET
from stages.serving.server import Server
from stages.serving.vllm_program import find_vllm

LOAD_GENERATOR = Path(__file__).with_name("load_generator.py")
TIMEOUT_S = 3600.0
METRICS = {
    "ttft_ms": "median_ttft_ms",
    "inter_token_latency_ms": "median_itl_ms",
    "output_tokens_per_s": "output_throughput",
}


def measure(server: Server, benchmark: BenchmarkConfig, folder: Path) -> dict[str, float]:
    """Median time to first token and between tokens, and throughput, as `METRIC_concurrency_N`.

    Leaves `benchmark.json` (the full results) and `benchmark.log` in `folder`. Raises ServerError when a request fails.
    """
    results = _run(server, [_arguments(server, benchmark, level) for level in benchmark.concurrencies], folder)
    metrics: dict[str, float] = {}
    for concurrency, result in zip(benchmark.concurrencies, results, strict=True):
        if result["failed"]:
            raise ServerError(
                f"{result['failed']} of {result['num_prompts']} requests failed under {concurrency} at a time; "
                f"see {folder / 'benchmark.log'} and {server.log_file}"
            )
        metrics |= {f"{ours}_concurrency_{concurrency}": float(result[theirs]) for ours, theirs in METRICS.items()}
    return metrics


def _arguments(server: Server, benchmark: BenchmarkConfig, concurrency: int) -> list[str]:
    options = {
        "backend": "openai",
        "base-url": server.url,
        "model": server.spec.model,
        "served-model-name": server.spec.served_name,
        "dataset-name": "random",
        "random-input-len": benchmark.input_tokens,
        "random-output-len": benchmark.output_tokens,
        "num-prompts": benchmark.requests_per_concurrency * concurrency,
        "num-warmups": concurrency,
        "max-concurrency": concurrency,
        "temperature": 0,
    }
    return ["--disable-tqdm", *(f"--{name}={value}" for name, value in options.items())]


def _run(server: Server, argument_lists: list[list[str]], folder: Path) -> list[dict[str, Any]]:
    output, log = folder / "benchmark.json", folder / "benchmark.log"
    with log.open("wb") as stream:
        ended = subprocess.run(
            [find_vllm().python, "-P", LOAD_GENERATOR, output],
            input=json.dumps(argument_lists).encode(),
            env={**os.environ, **QUIET, "OPENAI_API_KEY": server.api_key},
            stdout=stream,
            stderr=subprocess.STDOUT,
            timeout=TIMEOUT_S,
            check=False,
        )
    if ended.returncode:
        last = log.read_text(errors="replace").strip().rpartition("\n")[2]
        raise ServerError(f"`vllm bench serve` failed with exit code {ended.returncode}: {last}; its log is {log}")
    results: list[dict[str, Any]] = json.loads(output.read_text())
    return results
