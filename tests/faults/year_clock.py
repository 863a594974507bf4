"""Fake system clock that a test sets for all processes that it starts.

Only what the calendar says jumps; waiting takes as long as ever, and files have the machine's dates.
"""

import shutil
import struct
import subprocess
from datetime import UTC, datetime, timedelta
from pathlib import Path

SOURCE = Path(__file__).with_suffix(".c")


class Clock:
    """Fake system clock for a test and its processes. `environment` holds the variables that make a process use it."""

    def __init__(self, folder: Path, start: datetime) -> None:
        assert shutil.which("cc"), "the year's clock is a C program: install gcc"
        library = folder / "clock.so"
        subprocess.run(["cc", "-O2", "-shared", "-fPIC", "-o", library, SOURCE, "-ldl"], check=True)
        self._file = folder / "clock"
        self._file.write_bytes(bytes(8))
        self.environment = {"LD_PRELOAD": str(library), "YEAR_CLOCK": str(self._file)}
        self.set(start)

    def now(self) -> datetime:
        return datetime.now(UTC) + self._ahead

    def set(self, when: datetime) -> None:
        """Set the fake clock of all processes to a time before or after the real one."""
        self._ahead = timedelta(seconds=round((when - datetime.now(UTC)).total_seconds()))
        with self._file.open("r+b", buffering=0) as file:
            file.write(struct.pack("<q", int(self._ahead.total_seconds())))
