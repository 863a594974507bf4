"""Signs of life of processes on other hosts and in other containers: a file that is touched while they run.

A process of here is looked up by its number, and needs none. Clocks of hosts differ, so an age is the difference to a
file that is made now on the same file system.
"""

from __future__ import annotations

import os
import tempfile
import threading
import time
from contextlib import suppress
from pathlib import Path

from flows.ledger.process_identity import ProcessIdentity, boot_id

INTERVAL_S = 30.0
SILENCE_S = 600.0
"""A process elsewhere of which nothing was heard for so long counts as dead."""


class Heartbeat:
    """Touches a file, in a thread, until it is stopped; then removes it. A disk that refuses is asked again."""

    def __init__(self, file: Path):
        self._file = file
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="heartbeat", daemon=True)

    def start(self) -> None:
        """Touch it now, and then every 30 s."""
        self._touch()
        self._thread.start()

    def stop(self) -> None:
        """Remove the file. May be called again."""
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
    """Return whether a process elsewhere has given no sign of life for so long that it must be dead.

    files: what it touches or writes to; the latest of those that are there counts. An earlier boot of a host of this
    name has ended when nothing was heard since the present one began.
    """
    patience_s = SILENCE_S
    if process.host == os.uname().nodename and process.boot != boot_id():
        patience_s = min(SILENCE_S, time.clock_gettime(time.CLOCK_BOOTTIME))
    return _silence_s(files) > patience_s


def _silence_s(files: tuple[Path, ...]) -> float:
    """Seconds since the latest change of one of the files, 0 where that cannot be told."""
    try:
        with tempfile.TemporaryFile(dir=files[0].parent) as probe:
            os.utime(probe.fileno())
            now_s = os.fstat(probe.fileno()).st_mtime
        return min((now_s - file.stat().st_mtime for file in files if file.exists()), default=0.0)
    except OSError:
        return 0.0
