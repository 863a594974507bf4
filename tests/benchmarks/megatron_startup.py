"""Benchmark of Megatron's start-up: seconds from the start of the process to the end of the first training step.

Run: `python tests/benchmarks/megatron_startup.py`.
Megatron on the quickstart's model and data, tokenized before; one process, and two with TP2. Prints medians; their
bound is 15 s.
"""

import argparse
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from workload import run_stage, stage_input

from stages.hubs.builtin import addition, qwen3

LAYOUTS: dict[str, dict[str, Any]] = {"one process": {"micro_batch_size": 4}, "TP2": {"tp": 2, "micro_batch_size": 4}}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="megatron-startup-") as folder:
        root = Path(folder)
        for name, maker in (("model/model", qwen3), ("chats/data", addition)):
            (root / name).mkdir(parents=True)
            maker.make(root / name)
        seconds_to_first_step(root, "tokenize", {})
        for name, layout in LAYOUTS.items():
            label = name.replace(" ", "-")
            starts_s = [seconds_to_first_step(root, f"{label}-{index}", layout) for index in range(arguments.rounds)]
            print(f"{name}: median of {arguments.rounds} starts {statistics.median(starts_s):.1f} s", flush=True)


def seconds_to_first_step(root: Path, name: str, layout: dict[str, Any]) -> float:
    """Run a train stage; return the wall-clock seconds from its start to its first logged training step."""
    given = stage_input(root, name=name, steps=1)
    config = {**given.config, "engine": "megatron", "layout": layout}
    start_ms = time.time() * 1000
    (first_step,) = run_stage(root, given.model_copy(update={"config": config}), threads=1)
    return (first_step["time_ms"] - start_ms) / 1000


if __name__ == "__main__":
    main()
