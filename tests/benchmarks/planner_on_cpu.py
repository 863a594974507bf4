"""Does the planner rank layouts as this machine's CPU does? `python tests/benchmarks/planner_on_cpu.py`

Each layout runs in processes of its own on gloo, in turns, every other round in reverse order. Prints, for each, the
predicted and the measured step time, and Spearman's rank correlation. Measured is the median over rounds of a round's
median step; beside it stands the shortest step, which other programs of the machine disturb least. `--hardware`:
what `lifecycle calibrate` wrote; without it the built-in description counts.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
from pathlib import Path

from scipy.stats import spearmanr
from workload import run_stage, stage_input, write_workload

from stages.contract import StageInput
from stages.train.config import TrainConfig
from stages.train.layout import describe_layout
from stages.train.prediction import hardware_at_hand, predict, question_of, read_shape

LAYOUTS = (
    ("fsdp", {"micro_batch_size": 8}),
    ("fsdp", {"micro_batch_size": 1}),
    ("fsdp", {"micro_batch_size": 8, "recompute": "full"}),
    ("fsdp", {"dp_shard": 2, "micro_batch_size": 4}),
    ("fsdp", {"dp_shard": 4, "micro_batch_size": 1}),
    ("megatron", {"dp_shard": 2, "micro_batch_size": 4}),
    ("megatron", {"tp": 2, "micro_batch_size": 8}),
    ("megatron", {"tp": 2, "micro_batch_size": 1}),
    ("megatron", {"pp": 2, "micro_batch_size": 1}),
    ("megatron", {"pp": 2, "micro_batch_size": 8}),
    ("megatron", {"tp": 2, "pp": 2, "micro_batch_size": 2}),
)
WARMUP_STEPS = 2


def main() -> None:
    """Measure (or read what was measured), predict, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=8, help="measured steps of a round")
    parser.add_argument("--hardware", type=Path)
    parser.add_argument("--keep", type=Path, help="a JSON file for the measurements; read, if it is there")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="planner-on-cpu-") as folder:
        root = Path(folder)
        write_workload(root)
        told = [train_stage(root, number) for number in range(len(LAYOUTS))]
        if arguments.keep and arguments.keep.is_file():
            measured = json.loads(arguments.keep.read_text())
        else:
            measured = measure(root, told, arguments.rounds, arguments.steps)
        if arguments.keep:
            arguments.keep.write_text(json.dumps(measured))
        predicted = [predicted_s(root, one, arguments.hardware) for one in told]
    print_table([layout_of(one) for one in told], measured, predicted)


def train_stage(root: Path, number: int) -> StageInput:
    """The stage under a layout."""
    engine, layout = LAYOUTS[number]
    told = stage_input(root, name=f"layout-{number}", steps=1)
    return told.model_copy(update={"config": {**told.config, "engine": engine, "layout": layout}})


def measure(root: Path, told: list[StageInput], rounds: int, steps: int) -> list[list[list[float]]]:
    """Seconds of the measured steps, by layout and round."""
    measured: list[list[list[float]]] = [[] for _ in told]
    for turn in range(rounds):
        for number in range(len(told))[:: 1 if turn % 2 == 0 else -1]:
            config = {**told[number].config, "steps": WARMUP_STEPS + steps}
            one = told[number].model_copy(update={"name": f"layout-{number}-{turn}", "config": config})
            processes = TrainConfig.model_validate(config).processes
            figures = run_stage(root, one, threads=max(1, len(os.sched_getaffinity(0)) // processes))
            measured[number].append([step["step_time_s"] for step in figures[WARMUP_STEPS:]])
            print(f"round {turn}: {layout_of(one)}: {statistics.median(measured[number][-1]):.3f} s", flush=True)
    return measured


def predicted_s(root: Path, told: StageInput, file: Path | None) -> float:
    """The planner's step time for this stage on this machine."""
    config = TrainConfig.model_validate(told.config)
    hardware = hardware_at_hand(None, config.processes, file)
    assert hardware is not None, "a CPU is always known"
    return predict(question_of(config, read_shape(root / "model" / "model"), hardware), config).time.step_time_s


def layout_of(told: StageInput) -> str:
    """In one line."""
    config = TrainConfig.model_validate(told.config)
    return describe_layout(config.engine, config.layout)


def print_table(layouts: list[str], measured: list[list[list[float]]], predicted: list[float]) -> None:
    """A line a layout, and how alike the orders are."""
    medians = [statistics.median(statistics.median(steps) for steps in rounds) for rounds in measured]
    shortest = [min(min(steps) for steps in rounds) for rounds in measured]
    print(f"\n{'predicted s':>11} {'measured s':>11} {'shortest s':>11}  layout")
    for row in sorted(zip(predicted, medians, shortest, layouts, strict=True)):
        print("{:11.3f} {:11.3f} {:11.3f}  {}".format(*row))
    for name, found in (("measured", medians), ("shortest", shortest)):
        print(f"Spearman of predicted and {name}: {spearmanr(predicted, found).statistic:.2f}")


if __name__ == "__main__":
    main()
