"""A server that samples, started by the stage on its share of devices, and ended with it."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import torch

from stages.core.contract import StageContext
from stages.core.errors import ResourceError
from stages.kinds.train.execution import TrainExecution
from stages.parallel.accelerator import type_at_hand
from stages.serving.config import ServeExecution, ServingConfig
from stages.serving.engine import LaunchSpec
from stages.serving.registry import chosen_engine, new_launch_spec
from stages.serving.server import Server, started_server

BASE = "base"


@dataclass(frozen=True)
class OwnServer:
    """See `stages.kinds.train.rollouts.server.Host`. base: of an adapter, the folder of the frozen model."""

    remedy: ClassVar[str] = "is started again, with the same weights"

    context: StageContext
    serving: ServingConfig
    execution: TrainExecution
    base: Path | None

    @contextmanager
    def opened(self, folder: Path, name: str) -> Iterator[Server]:
        execution = ServeExecution(ready_timeout_s=self.execution.ready_timeout_s)
        log_file, runtime = self.context.work / "server.log", self.context.scratch / "server"
        self.prepare(folder)
        gpus = own_gpus(self.serving.tensor_parallel_size)
        with started_server(self._spec(folder, name), execution, log_file, runtime, gpus) as server:
            server.wait_until_ready(execution.ready_timeout_s)
            yield server

    def prepare(self, folder: Path) -> None:
        if self.base is None:
            chosen_engine(self.serving).prepare_reloads(folder)

    def _spec(self, folder: Path, name: str) -> LaunchSpec:
        if self.base is None:
            spec = new_launch_spec(folder.resolve(), name, self.serving)
        else:
            adapters = {name: folder.resolve()}
            spec = new_launch_spec(self.base, name, self.serving, adapters=adapters, base_name=BASE)
        return spec.model_copy(update={"for_training": True, "swaps_adapters": self.base is not None})


def own_gpus(num_wanted: int) -> dict[str, str]:
    """The environment that leaves the server those GPUs of this stage that no training process has."""
    variable = type_at_hand().visible_devices
    return not_trained_on(variable, os.environ, torch.accelerator.device_count(), num_wanted) if variable else {}


def not_trained_on(variable: str, environment: Mapping[str, str], num_devices: int, num_wanted: int) -> dict[str, str]:
    """`variable` with what it names, or else of so many devices, after the first ones, which the processes of this node
    train on. Raises ResourceError for fewer than wanted.
    """
    visible = (environment.get(variable) or ",".join(map(str, range(num_devices)))).split(",")
    num_training = int(environment.get("LOCAL_WORLD_SIZE", "1"))
    left = visible[num_training:]
    if len(left) < num_wanted:
        raise ResourceError(
            f"the server that samples takes {num_wanted} devices (serving.tensor_parallel_size), but {num_training} of "
            f"the {len(visible)} that this stage sees train ({variable}); give it {num_training + num_wanted}"
        )
    return {variable: ",".join(left)}
