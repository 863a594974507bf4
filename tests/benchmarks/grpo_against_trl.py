"""Benchmark of GRPO: episodes/s of our train stage, which samples from vLLM, against TRL with its own generation.

Run: `python tests/benchmarks/grpo_against_trl.py`.
Both sample as many completions of the same prompts a step from the same model, learn from them once, and sample the
next ones from the new weights. The model has first learned from the chats, so that its answers end by themselves and
differ in length, as those of a model that RL starts from do. TRL's server mode needs devices that its trainer does not
use, of which a CPU has none. Both have both cores, alternating. Prints the median ratio of rounds; steps of warm-up,
imports and vLLM's start are left out. Aim: 1.5.
"""

import argparse
import shutil
import statistics
import tempfile
from itertools import pairwise
from pathlib import Path

from workload import run_stage, run_trl, stage_input, write_workload

BEGINNING_STEPS = 100
WARMUP_STEPS = 2
THREADS = 2


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--generations", type=int, default=8)
    parser.add_argument("--completion-tokens", type=int, default=128)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="grpo-against-trl-") as folder:
        root = Path(folder)
        write_workload(root)
        run_stage(root, stage_input(root, name="beginning", steps=BEGINNING_STEPS), THREADS)
        shutil.rmtree(root / "model" / "model")
        (root / "beginning" / "model").rename(root / "model" / "model")
        ratios = [one_round(root, index, arguments) for index in range(arguments.rounds)]
    print(f"median: {statistics.median(ratios):.2f} times TRL's episodes/s")


def one_round(root: Path, index: int, arguments: argparse.Namespace) -> float:
    """Train once with our stage and once with TRL, and return our episodes/s divided by TRL's."""
    completions = arguments.prompts * arguments.generations
    grpo = {
        "num_generations": arguments.generations,
        "max_completion_length": arguments.completion_tokens,
        "rewards": {"has_an_e": {"type": "regex", "pattern": "e"}},
        "serving": {"kv_cache_memory_gib": 0.5},
    }
    given = stage_input(
        root,
        name=f"ours-{index}",
        steps=arguments.steps,
        method="grpo",
        global_batch_size=completions,
        layout={"micro_batch_size": 8},
        learning_rate=1e-5,
        schedule="constant",
        grpo=grpo,
    )
    metrics = run_stage(root, given, THREADS)
    ours_s = statistics.median(
        (after["time_ms"] - before["time_ms"]) / 1000 for before, after in pairwise(metrics[WARMUP_STEPS - 1 :])
    )
    sizes = ("--completions", completions, "--generations", arguments.generations)
    printed = run_trl(
        root,
        arguments.steps,
        THREADS,
        *map(str, (*sizes, "--completion-tokens", arguments.completion_tokens)),
        program="trl_grpo.py",
    )
    trl_s = statistics.median(printed["step_times_s"][WARMUP_STEPS:])
    lengths = [statistics.mean(row["completion_tokens"] for row in metrics), statistics.mean(printed["mean_lengths"])]
    print(
        f"round {index}: ours {completions / ours_s:.1f}, TRL {completions / trl_s:.1f} episodes/s, ratio "
        f"{trl_s / ours_s:.2f}; completions of {lengths[0]:.0f} and {lengths[1]:.0f} tokens",
        flush=True,
    )
    return trl_s / ours_s


if __name__ == "__main__":
    main()
