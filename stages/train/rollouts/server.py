"""The server that samples, as rank 0 has it: it is given new weights, and started again when it dies or hangs.

Whatever is under way when it goes is asked again of its successor, which has the same weights.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import torch

from stages.core.contract import StageContext
from stages.core.errors import LifecycleError, ResourceError, ServerError, TransientError
from stages.models.recorded import Predicted
from stages.parallel.accelerator import type_at_hand
from stages.rollouts.asking import Answer, Request, ask_all
from stages.serving.client import Client
from stages.serving.config import ServeExecution, ServingConfig
from stages.serving.launch import LaunchSpec
from stages.serving.registry import chosen_engine, new_launch_spec
from stages.serving.server import Server, started_server
from stages.train.execution import TrainExecution

MOST_RESTARTS = 3
"""In a row, without a round between them."""
BASE, POLICY = "base", "policy"


class RolloutServer:
    """Started with the first weights that it is given; to be closed."""

    def __init__(
        self, context: StageContext, serving: ServingConfig, execution: TrainExecution, base: Path | None
    ) -> None:
        """base: folder of the frozen model, where the weights are those of an adapter."""
        self._context = context
        self._serving = serving
        self._execution = execution
        self._base = base
        self._stack = ExitStack()
        self._server: Server | None = None
        self._folder: Path | None = None
        self._restarts = 0

    def take(self, folder: Path) -> None:
        """Answer with these weights from now on, and remove those of before. No request may be under way.

        Raises ServerError when no server comes up, TransientError when it goes again and again.
        """
        before, self._folder = self._folder, folder
        if self._base is None:
            chosen_engine(self._serving).prepare_reloads(folder)
        try:
            if self._server is None:
                self._start()
            elif self._base:
                self._swap_adapter(self._server, before)
            else:
                server, timeout_s = self._server, self._execution.rollout_timeout_s
                server.engine.reload_weights(server.address, server.api_key, folder, timeout_s)
        except (ServerError, TransientError) as error:
            if self._server is None:
                raise
            self._restart(error)
        if before:
            shutil.rmtree(before, ignore_errors=True)

    def ask(self, requests: Iterable[tuple[int, Request]], keep: Callable[[int, Request, Answer], None]) -> None:
        """`keep` gets the answer to each request, with its number. Raises ServerError for one that is refused,
        TransientError when the server goes again and again."""
        remaining = dict(requests)

        def kept(number: int, request: Request, answer: Answer) -> None:
            keep(number, request, answer)
            del remaining[number]

        while remaining:
            server, client = self._running, self._client
            named = [(number, {**request, "model": self._name}) for number, request in remaining.items()]
            try:
                ask_all(client, named, self._execution.concurrent_requests, kept, stall_s=client.timeout_s)
            except (ServerError, TransientError) as error:
                if isinstance(error, ServerError) and server.alive() and server.client.is_healthy():
                    raise
                self._restart(error)
        self._restarts = 0

    def predictions(self, rows: list[list[int]]) -> list[Predicted]:
        """Of tokens, by the weights that were taken last. Raises TransientError when it goes again and again."""
        while True:
            try:
                return self._client.predictions(rows)
            except (ServerError, TransientError) as error:
                self._restart(error)

    def close(self) -> None:
        """End the server."""
        self._stack.close()
        self._server = None

    @property
    def _running(self) -> Server:
        assert self._server, "weights are taken before anything is asked"
        return self._server

    @property
    def _client(self) -> Client:
        return replace(self._running.client, model=self._name, timeout_s=self._execution.rollout_timeout_s)

    @property
    def _name(self) -> str:
        """In requests: an adapter has a new one with each version, as servers know it by name."""
        assert self._folder
        return f"{POLICY}-{self._folder.name}" if self._base else POLICY

    def _swap_adapter(self, server: Server, before: Path | None) -> None:
        assert self._folder
        timeout_s = self._execution.rollout_timeout_s
        server.engine.load_adapter(server.address, server.api_key, self._name, self._folder.resolve(), timeout_s)
        if before:
            server.engine.unload_adapter(server.address, server.api_key, f"{POLICY}-{before.name}", timeout_s)

    def _restart(self, error: LifecycleError) -> None:
        self._restarts += 1
        if self._restarts > MOST_RESTARTS:
            raise TransientError(f"the server that samples failed {self._restarts} times in a row: {error}") from error
        self._context.warn(f"the server that samples is started again, with the same weights: {error}")
        self.close()
        self._start()

    def _start(self) -> None:
        execution = ServeExecution(ready_timeout_s=self._execution.ready_timeout_s)
        log_file, runtime = self._context.work / "server.log", self._context.scratch / "server"
        gpus = own_gpus(self._serving.tensor_parallel_size)
        with ExitStack() as stack:
            server = stack.enter_context(started_server(self._spec(), execution, log_file, runtime, gpus))
            server.wait_until_ready(execution.ready_timeout_s)
            self._stack = stack.pop_all()
        self._server = server

    def _spec(self) -> LaunchSpec:
        assert self._folder
        if self._base is None:
            spec = new_launch_spec(self._folder.resolve(), POLICY, self._serving)
        else:
            adapters = {self._name: self._folder.resolve()}
            spec = new_launch_spec(self._base, self._name, self._serving, adapters=adapters, base_name=BASE)
        return spec.model_copy(update={"for_training": True, "swaps_adapters": self._base is not None})


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
