"""Benchmark of loading a model with FSDP2 on gloo: seconds with two processes against one.

Run: `python tests/benchmarks/loading.py`.
A Qwen3 of 0.85 GiB. Each process reads the rows of its shards, then both compare with Transformers. Prints the median
ratio, over rounds of alternating runs with one thread a process, of the time from the start of a stage to the
beginning of its first step, imports included.
"""

import argparse
import statistics
import tempfile
import time
from pathlib import Path

from workload import run_stage, stage_input, write_workload

SIZES = {"hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 19, "num_attention_heads": 16}
SEQUENCE_LENGTH = 64


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="loading-") as folder:
        root = Path(folder)
        write_workload(root, **SIZES)
        seconds_of_start(root, "warm-up", 2)  # tokenizes the chats, once for all
        ratios = []
        for index in range(arguments.rounds):
            one_s, two_s = (seconds_of_start(root, f"{index}-of-{processes}", processes) for processes in (1, 2))
            ratios.append(two_s / one_s)
            print(f"round {index}: one process {one_s:.1f} s, two {two_s:.1f} s", flush=True)
    print(f"median: two processes take {statistics.median(ratios):.2f} of the time of one")


def seconds_of_start(root: Path, name: str, processes: int) -> float:
    given = stage_input(
        root,
        name=name,
        steps=1,
        data={"dataset": "chats", "sequence_length": SEQUENCE_LENGTH, "over_long": "drop"},
        global_batch_size=2,
        layout={"dp_shard": processes, "micro_batch_size": 2 // processes},
    )
    start_ms = time.time() * 1000
    (first_step,) = run_stage(root, given, threads=1)
    return (first_step["time_ms"] - start_ms) / 1000 - first_step["step_time_s"]


if __name__ == "__main__":
    main()
