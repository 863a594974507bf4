"""Benchmark of LoRA training: tokens/s and peak memory of our train stage against TRL's `SFTTrainer` with PEFT.

Both train with SFT on the same packed rows. Run: `python tests/benchmarks/adapters_against_trl.py`.
Same model, chats, rows, rank, precision, optimizer and number of threads, recomputation off on both sides, one process
each, alternating. Prints the medians of the rounds' ratios. Memory is the most that the process had resident since it
had the model, imports included. Aims: twice TRL's speed, 0.8 of its memory. With `--hidden-size 512 --layers 12` both
do little but multiply matrices, and the same ones, so that the ratio of speeds falls towards one.
"""

import argparse
import statistics
import tempfile
from pathlib import Path

from workload import ROWS_PER_STEP, SEQUENCE_LENGTH, run_stage, run_trl, stage_input, write_workload

WARMUP_STEPS = 2
ADAPTER = {"rank": 16, "alpha": 32}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--hidden-size", type=int, default=256)
    parser.add_argument("--layers", type=int, default=5)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="adapters-against-trl-") as folder:
        root = Path(folder)
        width = arguments.hidden_size
        sizes = {"hidden_size": width, "intermediate_size": 3 * width, "num_hidden_layers": arguments.layers}
        write_workload(root, **sizes)
        rounds = [one_round(root, index, arguments.steps, arguments.threads) for index in range(arguments.rounds)]
    speed, memory = (statistics.median(column) for column in zip(*rounds, strict=True))
    print(f"median: {speed:.2f} times TRL's tokens/s, {memory:.2f} times its peak memory")


def one_round(root: Path, index: int, steps: int, threads: int) -> tuple[float, float]:
    """Train once with our stage and once with TRL; return our tokens/s and peak memory divided by TRL's."""
    metrics = run_stage(root, stage_input(root, name=f"ours-{index}", steps=steps, adapter=ADAPTER), threads)
    ours = statistics.median(step["tokens_per_s"] for step in metrics[WARMUP_STEPS:])
    ours_gib = max(step["peak_memory_gib"] for step in metrics)
    printed = run_trl(root, steps, threads, "--rank", str(ADAPTER["rank"]))
    trl = ROWS_PER_STEP * SEQUENCE_LENGTH / statistics.median(printed["step_times_s"][WARMUP_STEPS:])
    trl_gib = printed["peak_memory_gib"]
    print(
        f"round {index}: ours {ours:,.0f}, TRL {trl:,.0f} tokens/s, ratio {ours / trl:.2f}; ours {ours_gib:.2f}, TRL "
        f"{trl_gib:.2f} GiB, ratio {ours_gib / trl_gib:.2f}",
        flush=True,
    )
    return ours / trl, ours_gib / trl_gib


if __name__ == "__main__":
    main()
