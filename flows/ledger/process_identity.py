"""Identity of processes in records that outlive them, and signs of life of processes on other hosts or in containers.

A number alone does not name a process: numbers are reused, and belong to a host and container. A process of this
machine is looked up by number and start time. One elsewhere touches a file while it runs. Clocks of hosts differ, so
the age of the file is the difference to a file that is made now on the same file system.
"""

from __future__ import annotations

import os
import tempfile
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Literal

from stages.core import process_tree
from stages.core.contract import StrictModel

BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
PID_NAMESPACE = Path("/proc/self/ns/pid")
Standing = Literal["alive", "dead", "foreign"]
"""State of a process: alive, dead, or foreign: of another boot, host or container, where it cannot be seen."""
INTERVAL_S = 30.0
SILENCE_S = 600.0
"""Seconds without a sign of life after which a process on another host or in another container counts as dead."""


class ProcessIdentity(StrictModel):
    """Identity of a process in a record, which stays unambiguous when the kernel reuses the process id.

    started_ticks: the kernel's clock at its start, which changes of the wall clock do not affect. boot, pid_namespace:
    where its number is valid; None in old records, which are taken for ones of this machine.
    """

    pid: int
    started_ticks: int
    boot: str | None = None
    pid_namespace: int | None = None
    host: str | None = None

    @classmethod
    def of(cls, pid: int) -> ProcessIdentity:
        """Return the identity of a living process by its process id. Raises `ProcessLookupError` when there is none."""
        started_ticks = process_tree.started_ticks(pid)
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
        return cls.of(os.getpid())

    def standing(self) -> Standing:
        """Return whether the recorded process is alive or dead; `foreign` if that cannot be seen from this machine."""
        if self.boot and (self.boot, self.pid_namespace) != (boot_id(), PID_NAMESPACE.stat().st_ino):
            return "foreign"
        return "alive" if process_tree.started_ticks(self.pid) == self.started_ticks else "dead"

    def alive(self) -> bool:
        return self.standing() == "alive"


def boot_id() -> str:
    """Return the kernel's random id of the current boot, which differs between hosts and restarts."""
    return BOOT_ID.read_text().strip()


class Heartbeat:
    """Heartbeat of a process for other hosts: a thread touches a file until it is stopped, then removes the file."""

    def __init__(self, file: Path):
        self._file = file
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="heartbeat", daemon=True)

    def start(self) -> None:
        """Start the heartbeat: touch its file now, and then every 30 s in a thread."""
        self._touch()
        self._thread.start()

    def stop(self) -> None:
        """Stop the heartbeat thread and remove its file; may be called repeatedly."""
        self._stopped.set()
        self._thread.join()
        with suppress(OSError):
            self._file.unlink(missing_ok=True)

    def _beat(self) -> None:
        while not self._stopped.wait(INTERVAL_S):
            self._touch()

    def _touch(self) -> None:
        with suppress(OSError):
            self._file.touch()


def is_silent(process: ProcessIdentity, *files: Path) -> bool:
    """Return whether a process elsewhere has given no sign of life for so long that it counts as dead.

    files: those that it writes to or touches; the latest counts. If it belongs to an earlier boot of a host of this
    name, silence since the present boot began is enough.
    """
    patience_s = SILENCE_S
    if process.host == os.uname().nodename and process.boot != boot_id():
        # Seconds since this host was started, those of a suspension included.
        patience_s = min(SILENCE_S, time.clock_gettime(time.CLOCK_BOOTTIME))
    return _silence_s(files) > patience_s


def _silence_s(files: tuple[Path, ...]) -> float:
    """Return the seconds since a process elsewhere last touched any of its files; 0 when they cannot be read."""
    try:
        with tempfile.TemporaryFile(dir=files[0].parent) as probe:
            # By the clock that also dates the touches of other hosts.
            os.utime(probe.fileno())
            now_s = os.fstat(probe.fileno()).st_mtime
        return min((now_s - file.stat().st_mtime for file in files if file.exists()), default=0.0)
    except OSError:
        return 0.0
