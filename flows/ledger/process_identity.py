"""Processes as records name them: a number, when it was given (numbers are used again), and where it counts."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Literal

from stages.core import supervisor
from stages.core.contract import StrictModel

BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
PID_NAMESPACE = Path("/proc/self/ns/pid")
Standing = Literal["alive", "dead", "foreign"]
"""`foreign`: it belongs to another boot, host or container, from where nobody can look at it."""


class ProcessIdentity(StrictModel):
    """A process; `started_ticks` is the kernel's clock at its start, which no change of the wall clock moves.

    boot, pid_namespace: where its number counts; None in records of earlier versions, which are taken to be of here.
    host: a name for messages.
    """

    pid: int
    started_ticks: int
    boot: str | None = None
    pid_namespace: int | None = None
    host: str | None = None

    @classmethod
    def of(cls, pid: int) -> ProcessIdentity:
        """Return the living process of this number. Raises `ProcessLookupError` when there is none."""
        started_ticks = supervisor.started_ticks(pid)
        if started_ticks is None:
            raise ProcessLookupError(pid)
        return cls(
            pid=pid,
            started_ticks=started_ticks,
            boot=boot_id(),
            pid_namespace=PID_NAMESPACE.stat().st_ino,
            host=os.uname().nodename,
        )

    @classmethod
    def own(cls) -> ProcessIdentity:
        """Return this process."""
        return cls.of(os.getpid())

    def standing(self) -> Standing:
        """Return whether it still runs, as far as that can be seen from here."""
        if self.boot and (self.boot, self.pid_namespace) != (boot_id(), PID_NAMESPACE.stat().st_ino):
            return "foreign"
        return "alive" if supervisor.started_ticks(self.pid) == self.started_ticks else "dead"

    def alive(self) -> bool:
        """Return whether it runs here."""
        return self.standing() == "alive"


def boot_id() -> str:
    """Return the kernel's name for the time since it was started; no two hosts share one."""
    return BOOT_ID.read_text().strip()
