"""Assignment of this machine's CPU slots and GPUs to the stages of a plan; the only I/O is a look for GPUs."""

import os
from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace

from flows.ledger.machine import gpus
from flows.planning.plan import Plan, PlannedStage
from flows.recipe.recipe import Recipe
from stages.core.contract import StageConfig
from stages.core.errors import ResourceError
from stages.parallel.device_types import are_hidden, device_type

GPU = device_type("cuda")
VISIBLE_DEVICES = GPU.visible_devices or ""
"""Environment variable that limits a process to some of the machine's GPUs (`CUDA_VISIBLE_DEVICES`)."""


def wanted_slots(config: StageConfig, count: int) -> int:
    """Return how many of the machine's `count` slots a stage occupies while it runs; slots limit parallel stages.

    0 for a stage that needs no GPU on a machine with GPUs, and on a cluster. Processes may share cores, but not GPUs.
    """
    if not config.execution.is_local:
        return 0
    if gpus() and not config.WAITS_FOR_GPUS:
        return 0
    return min(_devices(config), count)


def num_devices(config: StageConfig) -> int:
    """Return the devices (GPUs, or processes on a CPU) that a stage keeps busy on all nodes; 0 if it waits for none."""
    return config.devices * config.execution.nodes if config.WAITS_FOR_GPUS else 0


def own_gpus(config: StageConfig) -> list[int]:
    """Return the indices of the GPUs to which a stage is limited by `CUDA_VISIBLE_DEVICES`; empty without a limit."""
    named = config.execution.environment.get("CUDA_VISIBLE_DEVICES", "") if gpus() else ""
    # GPUs may also be named by UUID, which gives no index.
    return [int(number) for number in named.split(",") if number.isdecimal()]


def sees_gpus(config: StageConfig) -> bool:
    """Return whether a stage runs on this machine's GPUs, hidden neither by its recipe nor by the environment."""
    environment = {**os.environ, **config.execution.environment}
    return bool(gpus()) and config.execution.is_local and not are_hidden(GPU, environment)


def check_devices(planned: Plan) -> None:
    """Raise ResourceError if a stage would get too few GPUs, or this machine lacks something else that it needs."""
    for name, stage in planned.stages.items():
        if stage.action != "run" or not stage.config.WAITS_FOR_GPUS:
            continue
        if problem := next(_device_problems(stage.config), None):
            roles = stage.config.device_roles(VISIBLE_DEVICES, _named(stage.config))
            count = _num_gpus(stage.config)
            wanted = f"{count} GPU{'' if count == 1 else 's'}" + (f" ({roles})" if roles else "")
            raise ResourceError(f"stage {name} wants {wanted}, {problem}")
        if problem := next(stage.config.missing_here(gpus()), None):
            raise ResourceError(f"stage {name}: {problem}")


def device_notes(recipe: Recipe, chosen: Collection[str]) -> Iterator[str]:
    """Yield a note on each stage that divides its GPUs or cores, for example between training and sampling."""
    for name in chosen:
        config = recipe.stages[name]
        if roles := config.device_roles(VISIBLE_DEVICES, _named(config)):
            yield f"{name}: {roles}; on a CPU both share the cores"


def _device_problems(config: StageConfig) -> Iterator[str]:
    """Yield why a stage cannot get its GPUs: ends of messages that begin with the number that it needs."""
    execution, count, wanted = config.execution, len(gpus()), _num_gpus(config)
    if not execution.is_local:
        if problem := execution.options.gpu_problem(wanted):
            yield f"but execution.{execution.launcher}.{problem}"
        return
    if not count or (VISIBLE_DEVICES in execution.environment and not _named(config)):
        return  # there are no GPUs, or the recipe hides them from the stage
    field = f"execution.environment.{VISIBLE_DEVICES}"
    if named := _named(config):
        # Too few, or one of them twice.
        if len(set(named)) < max(wanted, len(named)):
            yield f"but {field} names {len(set(named))} ({','.join(named)}); name as many, each once"
        if beyond := [one for one in named if one.isdecimal() and int(one) >= count]:
            yield f"but {field} names {', '.join(beyond)}; this machine has 0 to {count - 1}"
    if wanted > count:
        shares = ", or set its execution.slots if processes are to share GPUs"
        remedy = "" if config.GPU_FOR_EACH_PROCESS else shares
        yield f"this machine has {count}; change its layout{remedy}"
    slots = execution.slots
    if slots and slots < wanted:
        yield f"but execution.slots is {slots}; each of its processes takes a GPU of its own: leave `slots` out"


def _named(config: StageConfig) -> list[str]:
    """Return the GPU indices that the recipe names for a stage in `CUDA_VISIBLE_DEVICES`; "" and -1 mean none."""
    named = config.execution.environment.get(VISIBLE_DEVICES, "")
    return [one.strip() for one in named.split(",")] if named not in ("", "-1") else []


def on_devices(planned: PlannedStage, numbers: Sequence[int]) -> PlannedStage:
    """Return the stage limited to these GPUs, unless its recipe sets `CUDA_VISIBLE_DEVICES`; same version."""
    execution = planned.config.execution
    if not gpus() or not numbers or VISIBLE_DEVICES in execution.environment:
        return planned
    # Processes number the GPUs that they see from 0, whichever these are.
    environment = {**execution.environment, VISIBLE_DEVICES: ",".join(map(str, numbers))}
    execution = execution.model_copy(update={"environment": environment})
    return replace(planned, config=planned.config.model_copy(update={"execution": execution}))


def _devices(config: StageConfig) -> int:
    return config.execution.slots or config.devices


def _num_gpus(config: StageConfig) -> int:
    """Return a stage's GPUs: one per slot or, where processes cannot share them, at least one per process."""
    return max(config.devices, _devices(config)) if config.GPU_FOR_EACH_PROCESS else _devices(config)
