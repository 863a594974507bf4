"""Comparison of the planner's ranking of layouts with step times measured on this machine's CPU.

Run: `python tests/benchmarks/planner_on_cpu.py`.
Layouts of one, two and four processes on gloo take turns, step after step of the same batch, and the groups of
processes do too, every other round in reverse order. Prints, for each, the predicted and the measured step time, and
Spearman's rank correlation. Measured is the median over rounds of a round's median step; beside it stands the shortest
step, which other programs of the machine disturb least. `--hardware`: what `lifecycle calibrate` wrote; without it the
built-in description counts.
"""

import argparse
import json
import os
import statistics
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from scipy.stats import spearmanr
from workload import ROWS_PER_STEP, SEQUENCE_LENGTH, VOCABULARY, make_model

from flows.launch.local import on_one_node
from stages.data.batch import IGNORED, Batch, Documents
from stages.engines.engine import Engine
from stages.kinds.train.config import TrainConfig
from stages.kinds.train.methods.sft import SftLoss
from stages.models.facts import ModelFacts
from stages.parallel.layout import describe_layout
from stages.parallel.processes import joined_processes
from stages.planner.costs import SearchRequest
from stages.planner.hardware import hardware_at_hand
from stages.planner.search import estimate

LAYOUTS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("fsdp", {"micro_batch_size": 8}),
    ("fsdp", {"micro_batch_size": 1}),
    ("fsdp", {"micro_batch_size": 8, "recompute": "full"}),
    ("megatron", {"micro_batch_size": 8}),
    ("fsdp", {"dp_shard": 2, "micro_batch_size": 4}),
    ("megatron", {"dp_shard": 2, "micro_batch_size": 4}),
    ("megatron", {"tp": 2, "micro_batch_size": 8}),
    ("megatron", {"tp": 2, "micro_batch_size": 1}),
    ("megatron", {"pp": 2, "micro_batch_size": 1}),
    ("megatron", {"pp": 2, "micro_batch_size": 8}),
    ("fsdp", {"dp_shard": 4, "micro_batch_size": 2}),
    ("megatron", {"tp": 2, "pp": 2, "micro_batch_size": 2}),
)
NUM_PROCESSES = (1, 2, 4)
WARMUP_STEPS = 2
LEARNING_RATE = 1e-3


def main() -> None:
    """Measure the step times of layouts on the CPU (or read earlier measurements), predict them, and print both."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--steps", type=int, default=8, help="number of measured training steps of each layout in a round (default: 8)"
    )
    parser.add_argument("--hardware", type=Path)
    parser.add_argument(
        "--keep",
        type=Path,
        help="JSON file that keeps the measurements; if it exists, they are read from it and nothing is measured",
    )
    parser.add_argument("--group", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.group:
        measure_group(arguments.group, arguments.steps)
        return
    with tempfile.TemporaryDirectory(prefix="planner-on-cpu-") as folder:
        model = Path(folder) / "model"
        make_model(model)
        if arguments.keep and arguments.keep.is_file():
            measured = json.loads(arguments.keep.read_text())
        else:
            measured = measure(model, arguments.rounds, arguments.steps)
        if arguments.keep:
            arguments.keep.write_text(json.dumps(measured))
        predicted = [predicted_s(model, one, arguments.hardware) for one in configs()]
    print_table([text_of(one) for one in configs()], measured, predicted)


def configs() -> list[TrainConfig]:
    """Return configs of one train stage that differ in their layout, for all layouts to compare."""
    shared = {
        "kind": "train",
        "method": "sft",
        "model": "model",
        "data": {"dataset": "chats", "sequence_length": SEQUENCE_LENGTH},
        "global_batch_size": ROWS_PER_STEP,
        "learning_rate": LEARNING_RATE,
        "precision": "fp32",
    }
    return [TrainConfig.model_validate({**shared, "engine": engine, "layout": layout}) for engine, layout in LAYOUTS]


def measure(model: Path, rounds: int, steps: int) -> list[list[list[float]]]:
    """Train under every layout; return the seconds of each training step, by layout and round."""
    measured: list[list[list[float]]] = [[] for _ in LAYOUTS]
    for turn in range(rounds):
        for processes in NUM_PROCESSES[:: 1 if turn % 2 == 0 else -1]:
            threads = max(1, len(os.sched_getaffinity(0)) // processes)
            command = on_one_node([__file__, "--group", str(model), "--steps", str(steps)], processes)
            environment = {**os.environ, "OMP_NUM_THREADS": str(threads)}
            subprocess.run(command, env=environment, check=True, stderr=subprocess.DEVNULL)
            for number, seconds in json.loads(result_file(model, processes).read_text()).items():
                measured[int(number)].append(seconds)
        print(f"round {turn + 1} of {rounds}", flush=True)
    return measured


def measure_group(model: Path, steps: int) -> None:
    """Measure the step times of all layouts for one number of processes, each of which calls this; rank 0 writes."""
    with joined_processes() as device:
        processes = dist.get_world_size()
        chosen = [number for number, one in enumerate(configs()) if one.layout.world_size == processes]
        seconds = {number: steps_s(model, configs()[number], device, steps) for number in chosen}
        if dist.get_rank() == 0:
            result_file(model, processes).write_text(json.dumps(seconds))


def steps_s(model: Path, config: TrainConfig, device: torch.device, steps: int) -> list[float]:
    """Return the seconds of each training step; a step counts from when all processes are ready until all are done."""
    engine = make_engine(model, config, device)
    rows = [batch_of(config.layout.micro_batch_size) for _ in range(config.micro_batches_per_step)]
    seconds = []
    for _ in range(WARMUP_STEPS + steps):
        dist.barrier()
        start_s = time.perf_counter()
        engine.train_step(rows, SftLoss(), LEARNING_RATE, 1.0)
        dist.barrier()
        seconds.append(time.perf_counter() - start_s)
    if config.engine == "megatron":
        from megatron.core import parallel_state

        parallel_state.destroy_model_parallel()
    return seconds[WARMUP_STEPS:]


def make_engine(model: Path, config: TrainConfig, device: torch.device) -> Engine:
    """Load the model into the training engine that the config names."""
    if config.engine == "fsdp":
        from stages.engines.fsdp.engine import FsdpEngine

        return FsdpEngine(ModelFacts(model), config.engine_settings, device)
    from stages.engines.megatron.compat import prepare_megatron

    prepare_megatron()
    from stages.engines.megatron.engine import MegatronEngine

    return MegatronEngine(ModelFacts(model), config.engine_settings, device)


def batch_of(num_rows: int) -> Batch:
    """Return a batch in which each row is one document."""
    tokens = torch.randint(0, VOCABULARY, (num_rows, SEQUENCE_LENGTH), generator=torch.Generator().manual_seed(0))
    targets = torch.cat([tokens[:, 1:], torch.full((num_rows, 1), IGNORED)], dim=1)
    positions = torch.arange(SEQUENCE_LENGTH).expand(num_rows, -1)
    ids = torch.arange(num_rows)[:, None].expand(-1, SEQUENCE_LENGTH)
    return Batch.of(tokens, targets, positions, Documents(ids, num_rows, [SEQUENCE_LENGTH] * num_rows))


def result_file(model: Path, processes: int) -> Path:
    """Return the path of the JSON file for the step times of all layouts with this number of processes."""
    return model.parent / f"seconds-{processes}.json"


def predicted_s(model: Path, config: TrainConfig, file: Path | None) -> float:
    """Return the step time in seconds that the planner predicts for a train stage on this machine."""
    hardware = hardware_at_hand(None, config.layout.world_size, file)
    assert hardware is not None, "a CPU is always known"
    shape = ModelFacts(model).shape
    request = SearchRequest(shape, config.workload, hardware, config.layout.world_size)
    return estimate(request, config.engine, config.layout).time.step_time_s


def text_of(config: TrainConfig) -> str:
    """Return engine and layout of a train stage as one line of text."""
    return describe_layout(config.engine, config.layout)


def print_table(layouts: list[str], measured: list[list[list[float]]], predicted: list[float]) -> None:
    """Print measured and predicted step time of each layout, and the rank correlation of both."""
    medians = [statistics.median(statistics.median(steps) for steps in rounds) for rounds in measured]
    shortest = [min(min(steps) for steps in rounds) for rounds in measured]
    print(f"\n{'predicted s':>11} {'measured s':>11} {'shortest s':>11}  layout")
    for row in sorted(zip(predicted, medians, shortest, layouts, strict=True)):
        print("{:11.3f} {:11.3f} {:11.3f}  {}".format(*row))
    for name, found in (("measured", medians), ("shortest", shortest)):
        print(f"Spearman of predicted and {name}: {spearmanr(predicted, found).statistic:.2f}")


if __name__ == "__main__":
    main()
