"""What every delivery needs: room on the disk, and progress in bytes, at a rate that a person can read."""

from __future__ import annotations

import shutil
import threading
import time
from pathlib import Path

from stages.core.contract import StageContext
from stages.core.errors import ResourceError

INTERVAL_S = 0.5
MIB, GIB = 1 << 20, 1 << 30


class Progress:
    """Counts bytes towards a total; may be called from several threads."""

    def __init__(self, context: StageContext, total_bytes: int) -> None:
        self._context = context
        self._total_bytes = total_bytes
        self._done_bytes = 0
        self._lock = threading.Lock()
        self._started_s = self._reported_s = time.monotonic()

    def add(self, num_bytes: int) -> None:
        """Count bytes that arrived; negative when they are thrown away."""
        with self._lock:
            self._done_bytes += num_bytes
            now_s = time.monotonic()
            if now_s - self._reported_s >= INTERVAL_S or self._done_bytes == self._total_bytes:
                self._reported_s = now_s
                rate = self._done_bytes / MIB / max(now_s - self._started_s, 1e-9)
                self._context.progress(self._done_bytes, self._total_bytes, "B", f"{rate:.1f} MiB/s")


def check_disk(folder: Path, needed_bytes: int) -> None:
    """Raise ResourceError when the disk of `folder` has less room."""
    free_bytes = shutil.disk_usage(folder).free
    if needed_bytes > free_bytes:
        raise ResourceError(
            f"the download needs {needed_bytes / GIB:.2f} GiB, but only {free_bytes / GIB:.2f} GiB are free where "
            f"{folder} lies; free some space, or set LIFECYCLE_HOME to a larger disk"
        )


def size_bytes(folder: Path) -> int:
    """Of all files below `folder`."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
