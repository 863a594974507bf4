"""Benchmark of SFT training: tokens/s of our train stage against TRL's `SFTTrainer`.

Run: `python tests/benchmarks/train_throughput.py`.
Same model, chats, rows, precision, optimizer and number of threads, packing on and recomputation off on both sides, one
process each, alternating. Prints the median of the rounds' ratios, and the share of the machine's measured matrix rate
that our model FLOPs make. Aim: twice TRL's speed, at least 1.5 times; half of the matrix rate.
"""

import argparse
import statistics
import tempfile
from pathlib import Path

from workload import ROWS_PER_STEP, SEQUENCE_LENGTH, run_stage, run_trl, stage_input, write_workload

WARMUP_STEPS = 3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--threads", type=int, default=2)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="train-throughput-") as folder:
        root = Path(folder)
        write_workload(root)
        rounds = [one_round(root, index, arguments.steps, arguments.threads) for index in range(arguments.rounds)]
    ratio, ours, trl, mfu = (statistics.median(column) for column in zip(*rounds, strict=True))
    print(f"median: {ratio:.2f} times TRL ({ours:,.0f} against {trl:,.0f} tokens/s); {mfu:.0%} of the matrix rate")


def one_round(root: Path, index: int, steps: int, threads: int) -> tuple[float, float, float, float]:
    """Train once with our stage and once with TRL; return the ratio of tokens/s, both, and our MFU by matmul rate."""
    metrics = run_stage(root, stage_input(root, name=f"ours-{index}", steps=steps), threads)[WARMUP_STEPS:]
    ours, mfu = (statistics.median(step[name] for step in metrics) for name in ("tokens_per_s", "mfu"))
    trl_times_s = run_trl(root, steps, threads)["step_times_s"][WARMUP_STEPS:]
    trl = ROWS_PER_STEP * SEQUENCE_LENGTH / statistics.median(trl_times_s)
    print(f"round {index}: ours {ours:,.0f}, TRL {trl:,.0f} tokens/s, ratio {ours / trl:.2f}", flush=True)
    return ours / trl, ours, trl, mfu


if __name__ == "__main__":
    main()
