"""Helpers of all downloads: a folder for arriving files, checks of disk space, progress in bytes per second."""

from __future__ import annotations

import hashlib
import shutil
import threading
import time
from collections.abc import Collection
from pathlib import Path

from stages.core.contract import StageContext
from stages.core.errors import DownloadError, ResourceError
from stages.core.redaction import quoted

INTERVAL_S = 0.5
MIB, GIB = 1 << 20, 1 << 30
SMALL_FILE_BYTES = 16 * MIB
"""Largest file in bytes that is read whole into memory, such as a model's config."""


class Progress:
    """Progress in bytes towards a total; may be called from several threads."""

    def __init__(self, context: StageContext, total_bytes: int) -> None:
        self._context = context
        self._total_bytes = total_bytes
        self._done_bytes = 0
        self._lock = threading.Lock()
        self._started_s = self._reported_s = time.monotonic()

    def add(self, num_bytes: int) -> None:
        """Count bytes of a download that arrived; negative when they are thrown away."""
        with self._lock:
            self._done_bytes += num_bytes
            now_s = time.monotonic()
            if now_s - self._reported_s >= INTERVAL_S or self._done_bytes == self._total_bytes:
                self._reported_s = now_s
                rate = self._done_bytes / MIB / max(now_s - self._started_s, 1e-9)
                self._context.progress(self._done_bytes, self._total_bytes, "B", f"{rate:.1f} MiB/s")


def arrivals_folder(context: StageContext, revision: str) -> Path:
    """Return the folder for a revision's arriving files: files of two revisions must not mix.

    Its name is a hash: a revision is the hub's own word, and may be a path.
    """
    folder = context.scratch / hashlib.sha256(revision.encode(errors="surrogatepass")).hexdigest()
    folder.mkdir(exist_ok=True)
    return folder


def hand_over(arrivals: Path, names: Collection[str], folder: Path) -> None:
    """Rename a download's folder of arrived files to `folder`, without files left by an earlier attempt."""
    for path in arrivals.rglob("*"):
        if (path.is_symlink() or not path.is_dir()) and path.relative_to(arrivals).as_posix() not in names:
            path.unlink()
    arrivals.replace(folder)


def check_small(num_bytes: int, name: str, source: object) -> None:
    """Raise DownloadError for a file that is too large to be read whole into memory."""
    if num_bytes > SMALL_FILE_BYTES:
        raise DownloadError(
            f"reading {quoted(name, 200)} of {source}: it has {num_bytes:,} bytes; expected at most "
            f"{SMALL_FILE_BYTES:,} of such a file. Check the source"
        )


def check_disk(folder: Path, needed_bytes: int) -> None:
    """Raise ResourceError when the disk of `folder` has too little free space."""
    free_bytes = shutil.disk_usage(folder).free
    if needed_bytes > free_bytes:
        raise ResourceError(
            f"the download needs {needed_bytes / GIB:.2f} GiB, but only {free_bytes / GIB:.2f} GiB are free where "
            f"{folder} lies; free some space, or set LIFECYCLE_HOME to a larger disk"
        )


def size_bytes(folder: Path) -> int:
    """Return the size of all files below `folder`."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
