"""Sampling server that the stage starts: on GPUs of its own, or on those that train, where it sleeps meanwhile."""

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import torch

from stages.core.contract import StageContext
from stages.core.errors import ResourceError
from stages.kinds.train.blocks import TrainExecution
from stages.kinds.train.config import TrainConfig
from stages.kinds.train.methods.rollouts import SamplingOptions
from stages.kinds.train.rollouts.server import POLICY, SamplingServer
from stages.models.facts import ModelFacts
from stages.parallel.accelerator import total_bytes, type_at_hand
from stages.planner.hardware import Efficiency
from stages.planner.memory import GIB, memory
from stages.planner.prediction import server_share
from stages.serving.config import ServeExecution, ServingConfig
from stages.serving.engine import LaunchSpec
from stages.serving.registry import chosen_engine, new_launch_spec
from stages.serving.server import Server, started_server

BASE = "base"
"""Name under which the sampling server serves the frozen base model of an adapter."""


@dataclass(frozen=True)
class OwnServer:
    """Sampling server that the stage starts and ends. base: folder of an adapter's frozen model.

    gpu_share: share of a GPU's memory that it may take beside what training keeps there; None: it has GPUs of its own.
    """

    remedy: ClassVar[str] = "is started again, with the same weights"

    context: StageContext
    options: SamplingOptions
    serving: ServingConfig
    execution: TrainExecution
    base: Path | None
    gpu_share: float | None = None

    @property
    def transfer(self) -> str | None:
        """Way in which a running server gets new weights without a folder, as adapters do not; None: by folders."""
        if self.base:
            return None
        placement = "colocated" if self.options.is_colocated else "separate"
        return chosen_engine(self.serving).weight_transfer(type_at_hand().name, placement)

    @property
    def is_adapter(self) -> bool:
        return self.base is not None

    def name_of(self, folder: Path) -> str:
        return f"{POLICY}-{folder.name}" if self.is_adapter else POLICY

    @contextmanager
    def opened(self, folder: Path) -> Iterator[Server]:
        execution = ServeExecution(ready_timeout_s=self.execution.ready_timeout_s)
        log_file, runtime = self.context.work / "server.log", self.context.scratch / "server"
        self.prepare(folder)
        gpus = server_gpus(self.serving.tensor_parallel_size * self._num_copies, shared=self.options.is_colocated)
        with started_server(self._spec(folder), execution, log_file, runtime, gpus) as server:
            server.wait_until_ready(execution.ready_timeout_s)
            if not server.spec.weight_transfer:
                yield server
                return
            timeout_s = self.execution.rollout_timeout_s
            with server.engine.connected(server.address, server.api_key, server.spec, timeout_s) as connection:
                server.connection = connection
                yield server

    def prepare(self, folder: Path) -> None:
        if self.base is None:
            chosen_engine(self.serving).prepare_reloads(folder)

    def load(self, server: SamplingServer, folder: Path, before: Path | None) -> None:
        engine, place, timeout_s = server.engine, (server.address, server.api_key), self.execution.rollout_timeout_s
        if not self.is_adapter:
            engine.reload_weights(*place, folder, timeout_s)
            return
        engine.load_adapter(*place, self.name_of(folder), folder.resolve(), timeout_s)
        if before:
            engine.unload_adapter(*place, self.name_of(before), timeout_s)

    def _spec(self, folder: Path) -> LaunchSpec:
        name = self.name_of(folder)
        if self.base is None:
            spec = new_launch_spec(folder.resolve(), name, self.serving)
        else:
            adapters = {name: folder.resolve()}
            spec = new_launch_spec(self.base, name, self.serving, adapters=adapters, base_name=BASE)
        return spec.model_copy(
            update={
                "for_training": True,
                "swaps_adapters": self.base is not None,
                "weight_transfer": self.transfer,
                "data_parallel_size": self._num_copies,
                "sleeps": self.options.is_colocated,
                "gpu_share": self.gpu_share,
            }
        )

    @property
    def _num_copies(self) -> int:
        return self.options.copies(num_training_here(os.environ))


def server_gpus(num_wanted: int, *, shared: bool) -> dict[str, str]:
    """Return the environment variable by which the sampling server sees only its GPUs: shared with training, or not."""
    variable = type_at_hand().visible_devices
    if not variable:
        return {}
    num_devices = torch.accelerator.device_count()
    return gpus_beside_training(variable, os.environ, num_devices, num_wanted, shared=shared)


def num_training_here(environment: Mapping[str, str]) -> int:
    """Return the number of training processes on this node, each of which has a device."""
    return int(environment.get("LOCAL_WORLD_SIZE", "1"))


def gpus_beside_training(
    variable: str, environment: Mapping[str, str], num_devices: int, num_wanted: int, *, shared: bool
) -> dict[str, str]:
    """Return a value for `variable`, which lists visible devices: those for the sampling server.

    shared: the first ones, on which this node trains; else those that its training processes leave free. Without a
    value in the environment there are `num_devices`. Raises ResourceError for fewer than wanted.
    """
    visible = (environment.get(variable) or ",".join(map(str, range(num_devices)))).split(",")
    num_training = num_training_here(environment)
    if shared:
        return {variable: ",".join(visible[:num_wanted])}
    # The training process with LOCAL_RANK i uses the i-th visible device, so those from `num_training` on are free.
    left = visible[num_training:]
    if len(left) < num_wanted:
        raise ResourceError(
            f"the server that samples takes {num_wanted} devices (serving.tensor_parallel_size × data_parallel_size), "
            f"but {num_training} of the {len(visible)} visible ones ({variable}) are used for training; give the stage "
            f"{num_training + num_wanted}, or let both share them (placement: colocated)"
        )
    return {variable: ",".join(left)}


def shared_gpu(config: TrainConfig, model: ModelFacts, device: torch.device) -> float | None:
    """Return the share of a GPU's memory for a sampling server beside training; None on a CPU, or with its own GPUs.

    Raises ModelError for a model whose sizes are unknown.
    """
    server = config.colocated_server
    if server is None or device.type == "cpu":
        return None
    needed = memory(model.shape, config.engine, config.layout, config.workload, server=server)
    assert needed.sampling
    return server_share(needed.sampling, total_bytes(device) / GIB, Efficiency())
