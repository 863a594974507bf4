"""Puts load on a server with `vllm bench serve`."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stages.core.errors import ServerError
from stages.core.supervised import was_killed
from stages.serving.config import BenchmarkConfig
from stages.serving.engine import LoadResult
from stages.serving.launch import LaunchSpec
from stages.serving.vllm.program import QUIET, find_vllm

if TYPE_CHECKING:
    from stages.serving.client import Client  # its HTTP imports would slow every plan

LOAD_GENERATOR = Path(__file__).with_name("load_generator.py")
TIMEOUT_S = 3600.0


def generate_load(client: Client, spec: LaunchSpec, benchmark: BenchmarkConfig, folder: Path) -> list[LoadResult]:
    """A result for each concurrency. Leaves `benchmark.json` (vLLM's own results) and `benchmark.log` in `folder`.

    Raises ServerError when the load generator fails.
    """
    arguments = [_arguments(client, spec, benchmark, concurrency) for concurrency in benchmark.concurrencies]
    return [
        LoadResult(
            concurrency=concurrency,
            num_requests=result["num_prompts"],
            num_failed=result["failed"],
            num_output_tokens=result["total_output_tokens"],
            ttft_ms=float(result["median_ttft_ms"]),
            # Not the median time between chunks: chunks that arrive together have none, however slow the tokens were.
            inter_token_latency_ms=float(result["median_tpot_ms"]),
            output_tokens_per_s=float(result["output_throughput"]),
        )
        for concurrency, result in zip(benchmark.concurrencies, _run(client, arguments, folder), strict=True)
    ]


def _arguments(client: Client, spec: LaunchSpec, benchmark: BenchmarkConfig, concurrency: int) -> list[str]:
    options = {
        "backend": "openai",
        "base-url": client.url,
        "model": spec.model,
        "served-model-name": spec.served_name,
        "dataset-name": "random",
        "random-input-len": benchmark.input_tokens,
        "random-output-len": benchmark.output_tokens,
        "num-prompts": benchmark.requests_per_concurrency * concurrency,
        "num-warmups": concurrency,
        "max-concurrency": concurrency,
        "temperature": 0,
    }
    return ["--disable-tqdm", *(f"--{name}={value}" for name, value in options.items())]


def _run(client: Client, argument_lists: list[list[str]], folder: Path) -> list[dict[str, Any]]:
    output, log = folder / "benchmark.json", folder / "benchmark.log"
    with log.open("wb") as stream:
        ended = subprocess.run(
            [find_vllm().python, "-P", LOAD_GENERATOR, output],
            input=json.dumps(argument_lists).encode(),
            env={**os.environ, **QUIET, "OPENAI_API_KEY": client.api_key},
            stdout=stream,
            stderr=subprocess.STDOUT,
            timeout=TIMEOUT_S,
            check=False,
        )
    if ended.returncode:
        last = log.read_text(errors="replace").strip().rpartition("\n")[2]
        reason = f"`vllm bench serve` failed with exit code {ended.returncode}: {last}; its log is {log}"
        raise ServerError(reason, died=was_killed(ended.returncode))
    results: list[dict[str, Any]] = json.loads(output.read_text())
    return results
