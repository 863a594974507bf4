"""Which slots, and which GPUs, a stage gets on this machine. Pure, but for looking whether there are GPUs."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace

from flows.ledger.machine import gpus
from flows.planning.plan import Plan, PlannedStage
from flows.recipe.recipe import Recipe
from stages.core.contract import StageConfig
from stages.core.errors import ResourceError
from stages.parallel.device_types import device_type
from stages.train.config import TrainConfig

VISIBLE_DEVICES = device_type("cuda").visible_devices or ""
"""Of the GPUs that `gpus` finds."""


def wanted_slots(config: StageConfig, count: int) -> int:
    """Slots a stage holds, of `count`. Processes may share cores, but not GPUs; a download needs no GPU.

    What runs on a cluster is queued there.
    """
    if config.execution.launcher != "local":
        return 0
    if gpus() and config.kind == "download":
        return 0
    return min(_devices(config), count)


def num_devices(config: StageConfig) -> int:
    """Devices that a stage keeps busy, on all nodes together; a download waits for the network alone."""
    return 0 if config.kind == "download" else config.devices * config.execution.nodes


def own_gpus(config: StageConfig) -> list[int]:
    """Numbers of the GPUs of this machine that a stage was limited to (`on_devices`); none where it was not."""
    named = config.execution.environment.get("CUDA_VISIBLE_DEVICES", "") if gpus() else ""
    return [int(number) for number in named.split(",") if number.isdecimal()]


def check_devices(planned: Plan) -> None:
    """Raises `ResourceError` when a stage that would run here wants more GPUs than there are."""
    count = len(gpus())
    for name, stage in planned.stages.items():
        wanted = _devices(stage.config)
        if stage.config.execution.launcher != "local":
            continue
        if count and stage.action == "run" and stage.kind != "download" and wanted > count:
            remedy = f"change its layout, or set stages.{name}.execution.slots if processes are to share GPUs"
            raise ResourceError(f"stage {name} wants {wanted} GPUs, this machine has {count}; {remedy}")


def device_notes(recipe: Recipe, chosen: Collection[str]) -> Iterator[str]:
    """How the devices of a stage are divided, where some do something else than others."""
    for name in chosen:
        config = recipe.stages[name]
        if isinstance(config, TrainConfig) and config.sampling:
            training, sampling = config.processes, config.devices - config.processes
            yield f"{name}: {training} devices train, {sampling} sample completions; on a CPU both share the cores"


def on_devices(planned: PlannedStage, numbers: Sequence[int]) -> PlannedStage:
    """The stage with its environment limited to these GPUs, unless the recipe names others; its version stays."""
    execution = planned.config.execution
    if not gpus() or not numbers or VISIBLE_DEVICES in execution.environment:
        return planned
    environment = {**execution.environment, VISIBLE_DEVICES: ",".join(map(str, numbers))}
    execution = execution.model_copy(update={"environment": environment})
    return replace(planned, config=planned.config.model_copy(update={"execution": execution}))


def _devices(config: StageConfig) -> int:
    return config.execution.slots or config.devices
