"""The server that samples, as rank 0 has it: it is given new weights, and opened again when it dies or hangs.

Whatever is under way when it goes is asked again of its successor, which has the same weights.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Protocol

from stages.core.errors import LifecycleError, ServerError, TransientError
from stages.kinds.train.execution import TrainExecution
from stages.models.recorded import Predicted
from stages.rollouts.asking import Answer, Request, ask_all
from stages.serving.backend import EngineAddress
from stages.serving.client import Client
from stages.serving.engine import Engine

MOST_RESTARTS = 3
"""In a row, without a round between them."""
POLICY = "policy"


class SamplingServer(Protocol):
    """A server that can be given weights. address: of the engine itself. alive: whether its process is, if known."""

    @property
    def client(self) -> Client: ...
    @property
    def engine(self) -> Engine: ...
    @property
    def address(self) -> EngineAddress: ...
    @property
    def api_key(self) -> str: ...

    def alive(self) -> bool: ...


class Host(Protocol):
    """Where a server comes from. remedy: what is done about one that failed, in messages."""

    @property
    def remedy(self) -> str: ...

    def opened(self, folder: Path, name: str) -> AbstractContextManager[SamplingServer]:
        """A server that answers by the weights of this folder; name: of an adapter, or of the model of a server that is
        started. Raises ServerError when none comes up, TransientError when none answers in time."""

    def prepare(self, folder: Path) -> None:
        """Make a folder, which the caller owns, fit to be reloaded from. Raises as `opened` does."""


class RolloutServer:
    """Opened with the first weights that it is given; to be closed."""

    def __init__(self, host: Host, execution: TrainExecution, warn: Callable[[str], None], *, is_adapter: bool) -> None:
        """is_adapter: whether the weights are those of one."""
        self._host = host
        self._execution = execution
        self._warn = warn
        self._is_adapter = is_adapter
        self._stack = ExitStack()
        self._server: SamplingServer | None = None
        self._folder: Path | None = None
        self._restarts = 0

    def take(self, folder: Path) -> None:
        """Answer with these weights from now on, and remove those of before. No request may be under way.

        Raises ServerError when no server comes up, TransientError when it goes again and again.
        """
        before, self._folder = self._folder, folder
        try:
            if self._server is None:
                self._start()
            elif self._is_adapter:
                self._swap_adapter(self._server, before)
            else:
                self._host.prepare(folder)
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
            named = [(number, {**request, "model": client.model}) for number, request in remaining.items()]
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
    def _running(self) -> SamplingServer:
        assert self._server, "weights are taken before anything is asked"
        return self._server

    @property
    def _client(self) -> Client:
        client = self._running.client
        model = self._name if self._is_adapter else client.model
        return replace(client, model=model, timeout_s=self._execution.rollout_timeout_s)

    @property
    def _name(self) -> str:
        """In requests: an adapter has a new one with each version, as servers know it by name."""
        assert self._folder
        return f"{POLICY}-{self._folder.name}" if self._is_adapter else POLICY

    def _swap_adapter(self, server: SamplingServer, before: Path | None) -> None:
        assert self._folder
        timeout_s = self._execution.rollout_timeout_s
        server.engine.load_adapter(server.address, server.api_key, self._name, self._folder.resolve(), timeout_s)
        if before:
            server.engine.unload_adapter(server.address, server.api_key, f"{POLICY}-{before.name}", timeout_s)

    def _restart(self, error: LifecycleError) -> None:
        self._restarts += 1
        if self._restarts > MOST_RESTARTS:
            reason = f"the server that samples failed {self._restarts} times in a row: {error}"
            raise TransientError(reason, died=not self._running.alive()) from error
        self._warn(f"the server that samples {self._host.remedy}: {error}")
        self.close()
        self._start()

    def _start(self) -> None:
        assert self._folder
        with ExitStack() as stack:
            server = stack.enter_context(self._host.opened(self._folder, self._name))
            self._stack = stack.pop_all()
        self._server = server
