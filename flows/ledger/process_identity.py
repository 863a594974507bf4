"""Which process a record means: its number, and when it started, since numbers are used again."""

from __future__ import annotations

import os
from pathlib import Path

from stages.core.contract import StrictModel


class ProcessIdentity(StrictModel):
    """A process; `started_ticks` is the kernel's clock at its start, which no change of the wall clock moves."""

    pid: int
    started_ticks: int

    @classmethod
    def of(cls, pid: int) -> ProcessIdentity:
        """The living process of this number. Raises `ProcessLookupError` when there is none."""
        started_ticks = _started_ticks(pid)
        if started_ticks is None:
            raise ProcessLookupError(pid)
        return cls(pid=pid, started_ticks=started_ticks)

    @classmethod
    def own(cls) -> ProcessIdentity:
        """This process."""
        return cls.of(os.getpid())

    def alive(self) -> bool:
        """Whether it still runs."""
        return _started_ticks(self.pid) == self.started_ticks


def _started_ticks(pid: int) -> int | None:
    """Field 22 of /proc/PID/stat, None for a process that has ended or waits to be reaped."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return None if fields[0] in "ZX" else int(fields[19])
