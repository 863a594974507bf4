"""Benchmark of scaling: training tokens/s per core with two processes against one, one thread each.

Run: `python tests/benchmarks/scaling.py`.
The same global batch, sharded over both processes with FSDP2 on gloo, weights kept whole between the passes;
alternating runs. Prints the median of the rounds' ratios: 1 would be free communication, the bound is 0.85. One core's
clock and cache depend on what the other does, so the single process is also run beside a second, independent one
("busy"): what is lost against that is what the parallelism costs.
"""

import argparse
import statistics
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from workload import run_stage, stage_input, write_workload

WARMUP_STEPS = 3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=12)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="train-scaling-") as folder:
        root = Path(folder)
        write_workload(root)
        tokens_per_s(root, "warm-up", 2, processes=1)  # tokenizes the chats, once for all
        rounds = [one_round(root, index, arguments.steps) for index in range(arguments.rounds)]
    alone, busy = (statistics.median(column) for column in zip(*rounds, strict=True))
    print(f"median: {alone:.2f} of one process's throughput per core; {busy:.2f} of one process beside another")


def one_round(root: Path, index: int, steps: int) -> tuple[float, float]:
    """Return tokens/s per core of two processes, relative to one alone, and to one beside another, independent one."""
    one = tokens_per_s(root, f"one-{index}", steps, processes=1)
    two = tokens_per_s(root, f"two-{index}", steps, processes=2)
    names = [f"busy-{index}-{number}" for number in range(2)]
    with ThreadPoolExecutor(2) as executor:
        busy = statistics.mean(executor.map(lambda name: tokens_per_s(root, name, steps, processes=1), names))
    print(f"round {index}: one {one:,.0f}, two {two:,.0f}, one beside another {busy:,.0f} tokens/s", flush=True)
    return two / 2 / one, two / 2 / busy


def tokens_per_s(root: Path, name: str, steps: int, processes: int) -> float:
    """Run a train stage on this number of processes, and return the median of its steps' tokens/s."""
    metrics = run_stage(root, stage_input(root, name=name, steps=steps, processes=processes), threads=1)
    return statistics.median(step["tokens_per_s"] for step in metrics[WARMUP_STEPS:] or metrics)


if __name__ == "__main__":
    main()
