"""A version that is being started, in a thread: whoever follows a champion goes on looking, and may stop the start.

Two engines that start at a time disturb each other, since each measures the memory that is free; so a start waits for
the end of what was stopped before it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future, wait
from pathlib import Path
from typing import TypeVar

from flows.champion.registry import RegisteredVersion
from flows.champion.serving import Serving, load_adapter, start_engine, unload_adapter
from stages.core.errors import LifecycleError
from stages.serving.server import Server

BUSY_S = 30.0
"""An engine that did not answer is busy or dies; it is known after so long which."""

T = TypeVar("T")


class StartStoppedError(Exception):
    """A start was stopped, since something else was more urgent."""


class Start:
    """The start of one version: of an engine, or in `running`, if that is the engine of its base.

    folder: as `start_engine` takes it. after: what is waited for before. loads_into: the running engine, unless it has
    turned out to be that of another base.
    """

    def __init__(
        self, version: RegisteredVersion, running: Serving | None, folder: Path, after: Iterable[Future[None]] = ()
    ):
        self.version = version
        self.loads_into = running
        self._folder = folder
        self._is_stopped = threading.Event()
        self._server: Server | None = None
        self.outcome: Future[Serving] = in_background(lambda: self._run([*after]))
        """Raises StartStoppedError, or what starting raises; nothing is left then."""

    def stop(self) -> Future[None]:
        """Stop it; returns what is done when nothing is left of it."""
        self._is_stopped.set()
        return in_background(self._end)

    def _run(self, after: list[Future[None]]) -> Serving:
        wait(after)
        self._check()
        if running := self.loads_into:
            serving = self._loaded(running)
            if serving:
                return serving
            self.loads_into = None
            self._check()
        return start_engine(self.version, self._folder, self._is_begun)

    def _loaded(self, running: Serving) -> Serving | None:
        try:
            return load_adapter(self.version, running)
        except LifecycleError:
            give_up_s = time.monotonic() + BUSY_S
            while not running.server.client.is_healthy() and time.monotonic() < give_up_s:
                if running.died.wait(0.1):
                    break
            raise

    def _is_begun(self, server: Server) -> None:
        self._server = server
        self._check()

    def _check(self) -> None:
        if self._is_stopped.is_set():
            raise StartStoppedError

    def _end(self) -> None:
        if self._server:
            self._server.process.stop()
        wait([self.outcome])
        if not self.outcome.exception():
            self._discard(self.outcome.result())

    def _discard(self, serving: Serving) -> None:
        if self.loads_into:
            unload_adapter(serving)
        else:
            serving.stack.close()


def in_background(call: Callable[[], T]) -> Future[T]:
    """Call in a thread that does not keep the process; returns what will hold the outcome."""
    outcome: Future[T] = Future()

    def run() -> None:
        try:
            outcome.set_result(call())
        except BaseException as error:  # for whoever asks for the outcome
            outcome.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return outcome
