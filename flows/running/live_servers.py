"""Servers of serve stages within a refresh, kept until the last stage that refers to them is done."""

from __future__ import annotations

import threading
from collections.abc import Collection, Mapping

from flows.running.runner import LiveServer
from flows.running.slots import HeldSlots


class LiveServers:
    """Servers that a refresh keeps. upstream: stage → the stages that it refers to."""

    def __init__(self, upstream: Mapping[str, Collection[str]]):
        self._upstream = upstream
        self._pending = set(upstream)
        self._servers: dict[str, tuple[LiveServer, HeldSlots]] = {}
        self._lock = threading.Lock()

    def keep(self, stage: str, server: LiveServer, slots: HeldSlots) -> None:
        """Keep a server and its slots for as long as a stage may use it."""
        with self._lock:
            self._servers[stage] = server, slots
        self._stop_unused()

    def serve(self, stages: Collection[str]) -> bool:
        """Return whether the server of one of these serve stages is up."""
        with self._lock:
            return any(name in stages and server.alive() for name, (server, _) in self._servers.items())

    def done_with(self, stage: str) -> None:
        """Release the servers that only `stage`, which is done or never will be, still needed."""
        with self._lock:
            self._pending.discard(stage)
        self._stop_unused()

    def stop_unusable(self, built: Collection[str]) -> None:
        """Stop servers that no stage can use now, dead ones too, to free the slots others wait for.

        A stage whose server is gone starts one of its own.
        """

        def is_usable(name: str) -> bool:
            users = (self._upstream[stage] for stage in self._users(name))
            return self.serve([name]) and any(all(stage in built for stage in upstream) for upstream in users)

        self._stop([name for name in self._names() if not is_usable(name)])

    def stop_all(self) -> None:
        """Stop every live server; return when no process of theirs is left."""
        self._stop(self._names())

    def _stop_unused(self) -> None:
        self._stop([name for name in self._names() if not self._users(name)])

    def _names(self) -> list[str]:
        with self._lock:
            return list(self._servers)

    def _users(self, name: str) -> list[str]:
        return [stage for stage in self._pending.copy() if name in self._upstream[stage]]

    def _stop(self, names: Collection[str]) -> None:
        for name in names:
            with self._lock:
                kept = self._servers.pop(name, None)
            if kept:
                server, slots = kept
                server.stop()
                slots.release()
