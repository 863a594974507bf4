"""Benchmark of the generate stage: output tokens/s, compared with the serve stage's benchmark on the same server.

`python tests/benchmarks/generate_throughput.py`: the quickstart's untrained model, the same lengths, number of requests
and requests at a time, greedy, in turns, of which each goes first in every other round. Prints the median ratio, whose
bound is 0.9.
"""

import argparse
import contextlib
import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from stages.hubs.builtin import qwen3
from stages.kinds.generate.config import GenerateConfig
from stages.rollouts.asking import sample_all
from stages.serving.config import BenchmarkConfig, ServingConfig
from stages.serving.registry import new_launch_spec
from stages.serving.served_models import AskExecution
from stages.serving.server import Server, started_server

FIRST_TOKEN, LAST_TOKEN = 10, 200
"""Smallest and largest token id in random prompts, so that they hold ordinary characters and no special tokens."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--concurrency", type=int, default=16)
    parser.add_argument(
        "--requests",
        type=int,
        default=16,
        help="number of requests in a round for each concurrent client (default: 16)",
    )
    parser.add_argument("--input-tokens", type=int, default=128)
    parser.add_argument("--output-tokens", type=int, default=64)
    given = parser.parse_args()
    load = BenchmarkConfig(
        concurrencies=(given.concurrency,),
        requests_per_concurrency=given.requests,
        input_tokens=given.input_tokens,
        output_tokens=given.output_tokens,
    )
    with tempfile.TemporaryDirectory(prefix="generate-throughput-") as folder, served(Path(folder), load) as server:
        ratios = []
        for round_number in range(given.rounds + 1):  # the first one warms up
            rates = rates_in_turns(server, load, Path(folder), round_number)
            ratios.append(rates["generate"] / rates["benchmark"])
            print(f"round {round_number}: {ratios[-1]:.2f} times ({rates})", flush=True)
    print(f"generate has {statistics.median(ratios[1:]):.2f} times the benchmark's tokens/s (median of {given.rounds})")


@contextlib.contextmanager
def served(root: Path, load: BenchmarkConfig) -> Iterator[Server]:
    (root / "model").mkdir()
    qwen3.make(root / "model")
    serving = {"max_model_len": load.tokens, "kv_cache_memory_gib": 0.25, "dtype": "float32"}
    spec = new_launch_spec(root / "model", "model", ServingConfig.model_validate(serving))
    with started_server(spec, AskExecution(), root / "server.log", root / "server") as server:
        server.wait_until_ready(600)
        yield server


def rates_in_turns(server: Server, load: BenchmarkConfig, folder: Path, round_number: int) -> dict[str, int]:
    """Return the output tokens/s of the serve stage's `benchmark` and of the generate stage, first in turn by round."""
    measure = {
        "benchmark": lambda: benchmark_rate(server, load, folder),
        "generate": lambda: generate_rate(server, load, folder, round_number),
    }
    order = list(measure) if round_number % 2 else list(reversed(measure))
    return {name: round(measure[name]()) for name in order}


def benchmark_rate(server: Server, load: BenchmarkConfig, folder: Path) -> float:
    (result,) = server.engine.generate_load(server.client, server.spec, load, folder)
    assert not result.num_failed
    return result.output_tokens_per_s


def generate_rate(server: Server, load: BenchmarkConfig, folder: Path, round_number: int) -> float:
    (concurrency,) = load.concurrencies
    config = GenerateConfig.model_validate(
        {
            "kind": "generate",
            "model": "model",
            "prompts": {"dataset": "prompts"},
            "temperature": 0.0,
            "max_tokens": load.output_tokens,
            "execution": {"concurrent_requests": concurrency},
        }
    )
    random = np.random.default_rng(0)  # the same prompts each time, as the benchmark's are: the server has seen both
    shape = (concurrency * load.requests_per_concurrency, load.input_tokens)
    prompts = random.integers(FIRST_TOKEN, LAST_TOKEN, shape).tolist()
    start_s = time.monotonic()
    samples = sample_all(
        server.client, prompts, config.sampling_options, folder / f"kept-{round_number}", lambda done, total: None
    )
    return sum(one.num_tokens for one in samples) / (time.monotonic() - start_s)


if __name__ == "__main__":
    main()
