"""Helpers for downloads from all hubs: a folder for incomplete files, disk-space checks, and progress reports."""

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
"""Largest size in bytes of a file that is read into memory as a whole, such as a model's config."""


class Progress:
    """Progress of a download in bytes and bytes per second; thread-safe."""

    def __init__(self, context: StageContext, total_bytes: int) -> None:
        self._context = context
        self._total_bytes = total_bytes
        self._done_bytes = 0
        self._lock = threading.Lock()
        self._started_s = self._reported_s = time.monotonic()

    def add(self, num_bytes: int) -> None:
        """Count received bytes. A negative number subtracts bytes that were thrown away."""
        with self._lock:
            self._done_bytes += num_bytes
            now_s = time.monotonic()
            if now_s - self._reported_s >= INTERVAL_S or self._done_bytes == self._total_bytes:
                self._reported_s = now_s
                # The clock may not have moved since the start.
                rate = self._done_bytes / MIB / max(now_s - self._started_s, 1e-9)
                self._context.progress(self._done_bytes, self._total_bytes, "B", f"{rate:.1f} MiB/s")


def arrivals_folder(context: StageContext, revision: str) -> Path:
    """Return the scratch folder for one revision's incomplete files, so that revisions cannot mix.

    Its name is a hash: a revision is the hub's own word, and may be a path.
    """
    folder = context.scratch / hashlib.sha256(revision.encode(errors="surrogatepass")).hexdigest()
    folder.mkdir(exist_ok=True)
    return folder


def move_into_place(arrivals: Path, names: Collection[str], folder: Path) -> None:
    """Move a complete download to `folder`, leaving out files of an earlier attempt."""
    for path in arrivals.rglob("*"):
        if (path.is_symlink() or not path.is_dir()) and path.relative_to(arrivals).as_posix() not in names:
            path.unlink()
    arrivals.replace(folder)


def check_small(num_bytes: int, name: str, source: object) -> None:
    """Raise DownloadError for a file that is too large to be read into memory as a whole."""
    if num_bytes > SMALL_FILE_BYTES:
        raise DownloadError(
            f"reading {quoted(name, 200)} of {source}: it has {num_bytes:,} bytes; expected at most "
            f"{SMALL_FILE_BYTES:,} of such a file. Check the source"
        )


def check_disk(folder: Path, needed_bytes: int) -> None:
    """Raise ResourceError if the disk that holds `folder` has less free space than needed."""
    free_bytes = shutil.disk_usage(folder).free
    if needed_bytes > free_bytes:
        raise ResourceError(
            f"the download needs {needed_bytes / GIB:.2f} GiB, but only {free_bytes / GIB:.2f} GiB are free where "
            f"{folder} lies; free some space, or set LIFECYCLE_HOME to a larger disk"
        )


def size_bytes(folder: Path) -> int:
    """Return the total size in bytes of all files below a folder."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
