"""A training stage's config and its model's shape → what the planner says of it on the machine at hand. No torch.

A CPU is described as one device that all processes of the machine share evenly; of accelerators each process has one.
The description is a YAML file (`lifecycle calibrate` writes one) or the built-in one that the device's name stands for.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from stages.core.errors import LayoutError
from stages.models.shape import ModelShape
from stages.parallel.layout import describe_layout
from stages.planner.hardware import HARDWARE, Hardware, built_in, from_yaml
from stages.planner.search import Candidate, Question, estimate, search
from stages.planner.workload import Workload
from stages.train.config import TrainConfig

UNCERTAINTY = 0.1
"""Share by which a prediction of memory may be too high: what would not fit even then is doomed."""
NUM_ALTERNATIVES = 5


def question_of(config: TrainConfig, shape: ModelShape, hardware: Hardware) -> Question:
    """What the planner is asked for the stage's model and batch, on as many devices as its layout has."""
    workload = Workload(
        sequence_length=config.data.sequence_length,
        global_batch_size=config.global_batch_size,
        precision=config.precision,
        needs_reference=config.learning.needs_reference,
    )
    return Question(shape, workload, hardware, config.layout.world_size)


def read_shape(model_folder: Path) -> ModelShape:
    """Of a Hugging Face folder. Raises ModelError for a model that the planner does not know."""
    return ModelShape.from_config(json.loads((model_folder / "config.json").read_text(encoding="utf-8")))


def shape_as_text(shape: ModelShape) -> str:
    """One line of JSON, what is default left out; `shape_from_text` reads it back."""
    known = {
        each.name: getattr(shape, each.name) for each in fields(shape) if getattr(shape, each.name) != each.default
    }
    return json.dumps(known, default=sorted)


def shape_from_text(text: str) -> ModelShape:
    """What `shape_as_text` wrote."""
    known: dict[str, Any] = json.loads(text)
    known |= {name: frozenset(value) for name, value in known.items() if isinstance(value, list)}
    return ModelShape(**known)


def hardware_at_hand(device_name: str | None, processes: int, file: Path | None) -> Hardware | None:
    """What each of this machine's `processes` runs on; None for an accelerator that nobody has described.

    device_name: the accelerator's, None on a CPU. file: the description, if it is there.
    Raises RecipeError when the file cannot be read.
    """
    if file and file.is_file():
        hardware: Hardware | None = from_yaml(file)
    else:
        hardware = named_like(device_name) if device_name else cpu_of(len(os.sched_getaffinity(0)))
    return shared_cpu(hardware, processes) if hardware and device_name is None else hardware


def named_like(device_name: str) -> Hardware | None:
    """The built-in description whose name's parts are all words of the device's: `NVIDIA A100-SXM4-80GB`."""
    words = device_name.lower().replace("-", " ").replace("_", " ").split()
    known = [name for name in HARDWARE if set(name.split("-")) <= set(words)]
    return HARDWARE[max(known, key=len)] if known else None


def cpu_of(num_cores: int) -> Hardware:
    """A machine of this many cores, each like those of the built-in description."""
    cpu = built_in("cpu")
    factor = num_cores / cpu.num_processors
    return replace(
        cpu, bf16_tflops=factor * cpu.bf16_tflops, fp32_tflops=factor * cpu.fp32_tflops, num_processors=num_cores
    )


def shared_cpu(machine: Hardware, processes: int) -> Hardware:
    """One process's share of a machine without accelerators."""
    return replace(
        machine,
        bf16_tflops=machine.bf16_tflops / processes,
        fp32_tflops=machine.fp32_tflops / processes,
        memory_gib=machine.memory_gib / processes,
        memory_gb_per_s=machine.memory_gb_per_s / processes,
        num_processors=max(1, machine.num_processors // processes),
        gpus_per_node=processes,
    )


def predicted_figures(candidate: Candidate) -> dict[str, float]:
    """Under the names of the measured ones."""
    figures = {
        "predicted_step_time_s": candidate.time.step_time_s,
        "predicted_memory_gib": candidate.memory.peak_gib,
    }
    bubble = {"predicted_pipeline_bubble_fraction": candidate.time.bubble_fraction}
    return {**figures, **(bubble if candidate.layout.pp > 1 else {})}


def check_memory(question: Question, asked: Candidate, free_gib: float) -> None:
    """Raises LayoutError when the layout needs more than each device has free, with the closest one that fits."""
    if asked.memory.peak_gib * (1 - UNCERTAINTY) <= free_gib:
        return
    parts = asked.memory.worst
    shown = ", ".join(f"{name} {value:.1f}" for name, value in _largest(vars(parts)))
    raise LayoutError(
        f"the layout {describe_layout(asked.engine, asked.layout)} would run out of memory: predicted are "
        f"{asked.memory.peak_gib:.1f} GiB a device ({shown}), free are {free_gib:.1f} GiB; "
        f"{_advice(replace(question, available_gib=free_gib), asked)}"
    )


def alternatives(question: Question) -> list[Candidate]:
    """The fastest layouts that fit, and nothing where none is legal."""
    try:
        return list(search(question).fitting[:NUM_ALTERNATIVES])
    except LayoutError:
        return []


def as_json(candidate: Candidate) -> dict[str, Any]:
    """A layout with what is predicted of it."""
    return {
        "layout": describe_layout(candidate.engine, candidate.layout),
        "step_time_s": candidate.time.step_time_s,
        "memory_gib": candidate.memory.peak_gib,
        "step_time_parts_s": vars(candidate.time.parts),
        "memory_parts_gib": vars(candidate.memory.worst),
    }


def closest(asked: Candidate, fitting: Sequence[Candidate]) -> Candidate:
    """The one that differs in the fewest fields; the fastest of those."""

    def distance(one: Candidate) -> int:
        own, other = asked.layout.model_dump(), one.layout.model_dump()
        return 100 * (one.engine != asked.engine) + sum(own[name] != other[name] for name in own)

    return min(fitting, key=lambda one: (distance(one), one.time.step_time_s))


def _advice(question: Question, asked: Candidate) -> str:
    try:
        fitting = search(question).fitting
    except LayoutError:
        fitting = ()
    if not fitting:
        return f"no layout of {question.num_gpus} devices fits: take more devices, or shorter rows"
    best = closest(asked, fitting)
    return f"the closest that fits: {describe_layout(best.engine, best.layout)} ({best.memory.peak_gib:.1f} GiB)"


def _largest(parts: dict[str, float]) -> list[tuple[str, float]]:
    return sorted(parts.items(), key=lambda part: part[1], reverse=True)[:3]


def predict(question: Question, config: TrainConfig) -> Candidate:
    """The layout of the config itself."""
    candidate = estimate(question, config.engine, config.layout)
    assert candidate is not None, "only with a bound on memory is there no estimate"
    return candidate
