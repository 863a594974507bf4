"""Aliases of a registered model, looked up in a thread, so that an MLflow that hangs stops nothing."""

from __future__ import annotations

import time
from collections.abc import Iterable
from concurrent.futures import Future

from flows.champion.registry import RegisteredVersion, Registry
from flows.champion.starting import in_background
from stages.core.errors import LifecycleError

LOOK_INTERVAL_S = 5.0


class Aliases:
    """The latest that MLflow said; what it does not answer stays as it was."""

    def __init__(self, registry: Registry, name: str, aliases: Iterable[str]):
        self._registry = registry
        self._name = name
        self._versions: dict[str, RegisteredVersion | None] = dict.fromkeys(aliases)
        self._refused: dict[str, str] = {}
        self._next_look_s = 0.0
        self._looking: Future[dict[str, RegisteredVersion | LifecycleError | None]] | None = None

    def look(self) -> dict[str, RegisteredVersion | LifecycleError | None]:
        """Return what has come in of each alias since the last call, nothing most of the time; ask again when it is
        time. Waits for nothing."""
        if self._looking is None:
            if time.monotonic() >= self._next_look_s:
                self._looking = in_background(self._asked)
            return {}
        if not self._looking.done():
            return {}
        found, self._looking = self._looking.result(), None
        self._next_look_s = time.monotonic() + LOOK_INTERVAL_S
        for alias, version in found.items():
            if not isinstance(version, LifecycleError):
                self._versions[alias] = version
                if version is None or version.number != self._refused.get(alias):
                    self._refused.pop(alias, None)
        return found

    def version(self, alias: str) -> RegisteredVersion | None:
        """The version that an alias is on, but for a refused one."""
        version = self._versions.get(alias)
        return version if version and version.number != self._refused.get(alias) else None

    def refuse(self, alias: str, version: RegisteredVersion) -> None:
        """Have an alias be on nothing as long as it is on a version that cannot be served."""
        self._refused[alias] = version.number

    def _asked(self) -> dict[str, RegisteredVersion | LifecycleError | None]:
        found: dict[str, RegisteredVersion | LifecycleError | None] = {}
        for alias in self._versions:
            try:
                found[alias] = self._registry.find(self._name, alias)
            except LifecycleError as error:
                found[alias] = error
        return found
