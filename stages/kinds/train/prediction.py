"""The planner's prediction for a training run on this machine, and the check that its memory suffices.

A run that cannot fit is refused before the model is built; an unknown model or device only warns.
"""

import dataclasses
import json
import os
from dataclasses import dataclass, field
from pathlib import Path

import torch

from stages.core.contract import StageContext, is_main_process
from stages.core.errors import ModelError
from stages.core.files import write_atomically
from stages.kinds.train.config import TrainConfig
from stages.models.facts import ModelFacts
from stages.models.shape import ModelShape
from stages.models.walked import shape_of
from stages.parallel.accelerator import device_name, free_bytes
from stages.parallel.host_memory import available_host_bytes
from stages.parallel.layout import Layout
from stages.parallel.processes import gathered
from stages.planner.costs import SearchRequest
from stages.planner.hardware import Hardware, hardware_at_hand
from stages.planner.prediction import (
    alternatives,
    as_json,
    check_memory,
    check_teacher_memory,
    predicted_metrics,
    teacher_memory_gib,
)
from stages.planner.search import Candidate, estimate
from stages.planner.workload import Workload

HARDWARE_VARIABLE = "LIFECYCLE_HARDWARE"
"""Environment variable that names a YAML description of the devices; default: the built-in descriptions."""
PREDICTION_FILE = "prediction.json"
GIB = 2**30


@dataclass(frozen=True)
class Prediction:
    """Planner's prediction for a run: layout and metrics. tags: texts for MLflow that say what it is based on."""

    layout: Layout
    """Layout to run with. The planner's choice replaces `layout: auto` here, where a prediction is possible."""
    metrics: dict[str, float] = field(default_factory=dict)
    tags: dict[str, str] = field(default_factory=dict)


def predict_run(
    config: TrainConfig,
    context: StageContext,
    shape: ModelShape | None,
    teacher: ModelFacts | None,
    device: torch.device,
    *,
    workload: Workload,
) -> Prediction:
    """Predict memory and step time, check that memory suffices, and write `prediction.json`. Collective.

    Raises LayoutError on every process when even the device with the most free memory has too little.
    """
    available_gib = min(gathered(_available_memory_gib(device)))  # every process must come to the same decision
    hardware = _hardware(config, context, device)
    if shape is None or hardware is None:
        return Prediction(config.layout)
    server = config.colocated_server
    request = SearchRequest(shape, workload, hardware, config.layout.world_size, server=server)
    candidate = estimate(request, config.engine, config.layout)
    check_memory(request, candidate, available_gib)
    of_teacher = _check_teacher(config, teacher, request, candidate, available_gib)
    if is_main_process():
        _write(context.work / PREDICTION_FILE, request, candidate)
    tags = {
        "model_shape": shape.to_json(),
        "workload": workload.to_json(),
        "planner_hardware": hardware.name,
    }
    return Prediction(candidate.layout, {**predicted_metrics(candidate), **of_teacher}, tags)


def _check_teacher(
    config: TrainConfig, teacher: ModelFacts | None, request: SearchRequest, candidate: Candidate, available_gib: float
) -> dict[str, float]:
    """Check that the teacher fits into memory; return its predicted GiB, or {} if on a server or unknown."""
    if teacher is None:
        return {}
    try:
        shape = shape_of(teacher)
    except ModelError:
        return {}
    teacher_gib = teacher_memory_gib(dataclasses.replace(request, shape=shape), candidate)
    check_teacher_memory(teacher_gib, candidate, available_gib, beside_model=config.on_policy is not None)
    return {"predicted_teacher_memory_gib": teacher_gib}


def _hardware(config: TrainConfig, context: StageContext, device: torch.device) -> Hardware | None:
    name = device_name(device)
    described = os.environ.get(HARDWARE_VARIABLE)
    hardware = hardware_at_hand(name, config.processes, Path(described) if described else None)
    if hardware is None:
        context.warn(f"memory and step time are not predicted: no description of a {name}; give one as YAML")
    return hardware


def _write(path: Path, request: SearchRequest, candidate: Candidate) -> None:
    document = {
        "hardware": dataclasses.asdict(request.hardware),
        "predicted": as_json(candidate),
        "alternatives": [as_json(one) for one in alternatives(request)],
    }
    write_atomically(path, json.dumps(document, indent=1))


def _available_memory_gib(device: torch.device) -> float:
    """Return free memory in GiB: the GPU's, or this process's share of the host's."""
    if device.type != "cpu":
        return free_bytes(device) / GIB
    return available_host_bytes() / GIB / int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
