"""Slots and GPUs that a stage gets on this machine. Pure, except for looking whether there are GPUs."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace

from flows.ledger.machine import gpus
from flows.planning.plan import Plan, PlannedStage
from flows.recipe.recipe import Recipe
from stages.core.contract import StageConfig
from stages.core.errors import ResourceError
from stages.kinds.train.config import TrainConfig
from stages.parallel.device_types import device_type, missing_package
from stages.planner.hardware import named_like

VISIBLE_DEVICES = device_type("cuda").visible_devices or ""
"""Variable that limits a process to some of the GPUs that `gpus` finds."""


def wanted_slots(config: StageConfig, count: int) -> int:
    """Return the number of slots that a stage holds, of `count`.

    Processes may share cores, but not GPUs; a download needs no GPU. What runs on a cluster is queued there.
    """
    if config.execution.launcher != "local":
        return 0
    if gpus() and config.kind == "download":
        return 0
    return min(_devices(config), count)


def num_devices(config: StageConfig) -> int:
    """Return the number of devices that a stage keeps busy, on all nodes together; 0 for downloads."""
    return 0 if config.kind == "download" else config.devices * config.execution.nodes


def own_gpus(config: StageConfig) -> list[int]:
    """Return the numbers of the GPUs of this machine that a stage was limited to (`on_devices`), if it was."""
    named = config.execution.environment.get("CUDA_VISIBLE_DEVICES", "") if gpus() else ""
    return [int(number) for number in named.split(",") if number.isdecimal()]


def check_devices(planned: Plan) -> None:
    """Raise `ResourceError` when a stage would get too few GPUs, or this machine lacks what its precision needs.

    Each process of a training takes a GPU of its own.
    """
    for name, stage in planned.stages.items():
        if stage.action != "run" or stage.kind == "download":
            continue
        if problem := next(_device_problems(stage.config), None):
            split = _split(stage.config)
            count = _num_gpus(stage.config)
            wanted = f"{count} GPU{'' if count == 1 else 's'}" + (f" ({split})" if split else "")
            raise ResourceError(f"stage {name} wants {wanted}, {problem}")
        if isinstance(stage.config, TrainConfig) and (problem := next(_precision_problems(stage.config), None)):
            raise ResourceError(f"stage {name}: {problem}")


def device_notes(recipe: Recipe, chosen: Collection[str]) -> Iterator[str]:
    """Yield how the devices of a stage are divided, where some train and others sample."""
    for name in chosen:
        config = recipe.stages[name]
        if split := _split(config):
            yield f"{name}: {split}; on a CPU both share the cores"


def _split(config: StageConfig) -> str | None:
    if not isinstance(config, TrainConfig) or not config.sampling_devices:
        return None
    training = "1 device trains" if config.processes == 1 else f"{config.processes} devices train"
    sampling = "1 samples" if config.sampling_devices == 1 else f"{config.sampling_devices} sample"
    sentence = f"{training}, {sampling} completions"
    named = _named(config)
    if not named:
        return sentence
    own, others = (",".join(part) for part in (named[: config.processes], named[config.processes :]))
    return f"{sentence}: {VISIBLE_DEVICES} {own} and {others}"


def _device_problems(config: StageConfig) -> Iterator[str]:
    """Yield what to change in a stage, as the end of a sentence that says how many GPUs it wants."""
    execution, count, wanted = config.execution, len(gpus()), _num_gpus(config)
    if execution.launcher != "local":
        cluster = execution.slurm if execution.launcher == "slurm" else execution.kubernetes
        asked = cluster.gpus_per_node
        if asked and asked < wanted:
            yield f"but execution.{execution.launcher}.gpus_per_node is {asked}; raise it, or change its layout"
        return
    if not count or (VISIBLE_DEVICES in execution.environment and not _named(config)):
        return  # there are no GPUs, or the recipe hides them from the stage
    field = f"execution.environment.{VISIBLE_DEVICES}"
    if named := _named(config):
        if len(set(named)) < max(wanted, len(named)):
            yield f"but {field} names {len(set(named))} ({','.join(named)}); name as many, each once"
        if beyond := [one for one in named if one.isdecimal() and int(one) >= count]:
            yield f"but {field} names {', '.join(beyond)}; this machine has 0 to {count - 1}"
    if wanted > count:
        remedy = (
            "" if isinstance(config, TrainConfig) else ", or set its execution.slots if processes are to share GPUs"
        )
        yield f"this machine has {count}; change its layout{remedy}"
    slots = execution.slots
    if slots and slots < wanted:
        yield f"but execution.slots is {slots}; each of its processes takes a GPU of its own: leave `slots` out"


def _precision_problems(config: TrainConfig) -> Iterator[str]:
    """Yield what this machine lacks for products in 8 bits; clusters are checked when the stage starts."""
    if config.precision != "fp8" or config.execution.launcher != "local":
        return
    if not gpus():
        yield "`precision: fp8` is for NVIDIA GPUs, and this machine has none; set `precision: bf16`"
    for name in gpus():
        hardware = named_like(name)
        if hardware and hardware.fp8_tflops is None:
            yield f"`precision: fp8`: {name} does not multiply in 8 bits; set `precision: bf16`"
    if missing := missing_package(config.engine, config.precision):
        yield missing


def _named(config: StageConfig) -> list[str]:
    """Return the GPUs that the recipe names for a stage; "" and -1 mean none."""
    named = config.execution.environment.get(VISIBLE_DEVICES, "")
    return [one.strip() for one in named.split(",")] if named not in ("", "-1") else []


def on_devices(planned: PlannedStage, numbers: Sequence[int]) -> PlannedStage:
    """Return the stage with its environment limited to these GPUs, unless the recipe names others.

    The stage's version does not change.
    """
    execution = planned.config.execution
    if not gpus() or not numbers or VISIBLE_DEVICES in execution.environment:
        return planned
    environment = {**execution.environment, VISIBLE_DEVICES: ",".join(map(str, numbers))}
    execution = execution.model_copy(update={"environment": environment})
    return replace(planned, config=planned.config.model_copy(update={"execution": execution}))


def _devices(config: StageConfig) -> int:
    return config.execution.slots or config.devices


def _num_gpus(config: StageConfig) -> int:
    """Return the number of GPUs: one for each training process, whatever slots they hold."""
    return max(config.devices, _devices(config)) if isinstance(config, TrainConfig) else _devices(config)
