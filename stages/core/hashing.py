"""Hashing (sha256) of large files in parallel, with progress on stderr and a cache, so that each is hashed once.

Hashes are in `<LIFECYCLE_HOME>/cache/hashes.sqlite`, by path, size, times and inode; not of a file that changed within
the last seconds, as a file system's clock may be too coarse to tell its next change.
"""

from __future__ import annotations

import hashlib
import os
import sqlite3
import struct
import sys
import threading
import time
from array import array
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, Literal

from stages.core.errors import TransientError
from stages.core.lines import say

CHUNK_BYTES = 1 << 20
MIN_CACHED_BYTES = 1 << 20
"""Smallest size in bytes of a file whose hash is cached; smaller files are read as fast as they are looked up."""
MANY_FILES = 1000
"""Number of files from which on all are cached, also small ones: opening each would take as long as reading it."""
FILES_AT_ONCE = 64
"""Number of many files that a thread hashes before it takes the next."""
FileTimes = tuple[int, int, int, int]
"""Size in bytes of a file, its times of change (of content, and of status) in ns, and inode, which tell a change."""
ENTRY = struct.Struct("<4Q32s")
MIN_LIMITED_BYTES, BYTES_TO_OPEN = 16 << 20, 1 << 16
"""Smallest total size of files whose hashing has a time limit, and bytes that opening a file counts as."""
SETTLED_S = 2
THREADS = 4
REPORT_INTERVAL_S = 5
GIB = 1 << 30


def content_hasher(algorithm: Literal["sha256", "git-blob-sha1"], size_bytes: int) -> hashlib._Hash:
    """Return a hasher for a file's content with sha256, or as a Git blob id, which also covers the file's size."""
    if algorithm == "sha256":
        return hashlib.sha256()
    return hashlib.sha1(f"blob {size_bytes}\0".encode(), usedforsecurity=False)


def sha256_of_files(
    files: Mapping[str, Path | str],
    limit_s: float | None = None,
    times: Mapping[str, FileTimes] | None = None,
) -> dict[str, str]:
    """Return the sha256 hex digest of each file, by name; progress is printed on stderr if it takes long.

    limit_s: time after which (but for small files) TransientError is raised; finished files are not hashed again.
    times: of the files, if a caller has them. Raises `OSError`.
    """
    times = times or {name: times_of(os.stat(path)) for name, path in files.items()}  # noqa: PTH116 (half as fast)
    many = _ManyFiles.of(files, times)
    known = many.digests() if many else {}
    rest = [name for name in files if name not in known]
    total_bytes = sum(times[name][0] for name in rest)
    is_small = total_bytes + len(rest) * BYTES_TO_OPEN < MIN_LIMITED_BYTES
    end_s = None if limit_s is None or is_small else time.monotonic() + limit_s
    job = _Job(total_bytes)
    pool = ThreadPoolExecutor(THREADS)
    hashed: dict[str, str] = {}
    kept_s = time.monotonic()
    try:
        step = FILES_AT_ONCE if many else 1
        tasks = [rest[begin : begin + step] for begin in range(0, len(rest), step)]
        pending = [pool.submit(lambda task: [job.hash(files[name]) for name in task], task) for task in tasks]
        for task, future in zip(tasks, pending, strict=True):
            hashed.update(zip(task, future.result(end_s and max(0.0, end_s - time.monotonic())), strict=True))
            if many and time.monotonic() - kept_s > REPORT_INTERVAL_S:  # a plan may end while its thread still hashes
                many.keep(known | hashed)
                kept_s = time.monotonic()
        return {name: known.get(name) or hashed[name] for name in files}
    except TimeoutError as error:
        if limit_s is None:  # a file system's
            raise
        slow = f"hashing its {total_bytes / GIB:.1f} GiB takes longer than {limit_s:g} s"
        if many:
            slow = f"hashing its {len(rest):,} files takes longer than {limit_s:g} s, {len(hashed):,} are done and kept"
        raise TransientError(f"{slow}; `lifecycle run` takes the time, once") from error
    finally:
        job.stop()  # otherwise Ctrl-C would wait until the last file is read
        pool.shutdown(cancel_futures=True)
        if many and hashed:
            many.keep(known | hashed)


def digest_of_many(source: str, times: Mapping[str, FileTimes], compute: Callable[[], str]) -> str:
    """Return the digest that `compute` makes of many files and of what `source` says of them, once while none changes.

    times: of the files, by name.
    """
    if len(times) < MANY_FILES:
        return compute()
    numbers = array("Q", chain.from_iterable(times.values()))
    listing = hashlib.sha256("\0".join((source, *times)).encode(errors="surrogateescape"))
    listing.update(numbers)
    key = f"{len(times)} files|{listing.hexdigest()}"
    if known := _lookup(key):
        return known
    digest = compute()
    if max(max(numbers[1::4]), max(numbers[2::4])) < _settled_ns():
        _keep(key, digest)
    return digest


def _settled_ns() -> int:
    """Return the time before which a file's last change tells its next one."""
    return time.time_ns() - int(SETTLED_S * 1e9)


@dataclass(frozen=True)
class _ManyFiles:
    """Many files below one folder, of any size, whose hashes are cached together, as one row of the database.

    A row holds the names, and of each file its size, times, inode and digest; also of files that are not among these,
    since another recipe may read others of the same folder.
    """

    folder: str
    times: Mapping[str, FileTimes]

    @classmethod
    def of(cls, files: Mapping[str, Path | str], times: Mapping[str, FileTimes]) -> _ManyFiles | None:
        """Return the files if they are many, and their names are paths below one folder; else None."""
        if len(files) < MANY_FILES:
            return None
        name, path = next(iter(files.items()))
        folder = str(path).removesuffix(name)
        if any(folder + name != str(path) for name, path in files.items()):
            return None
        return cls(os.path.realpath(folder), times)

    def digests(self) -> dict[str, str]:
        """Return the cached digests of those files that have not changed since, by name."""
        kept, digests = self._kept(), {}
        for name, times in self.times.items():
            if (entry := kept.get(name)) and entry[:-1] == times:
                digests[name] = entry[-1].hex()
        return digests

    def keep(self, digests: Mapping[str, str]) -> None:
        """Cache digests, but of files that changed within the last seconds."""
        before_ns = _settled_ns()
        kept = self._kept()
        for name, digest in digests.items():
            times = self.times[name]
            if max(times[1:3]) < before_ns:
                kept[name] = (*times, bytes.fromhex(digest))
        names = "\0".join(kept).encode(errors="surrogateescape")
        entries = b"".join(ENTRY.pack(*entry) for entry in kept.values())
        with _database() as database:
            if database and kept:
                row = (self.folder, names, entries)
                database.execute("INSERT OR REPLACE INTO folders VALUES (?, ?, ?)", row)
                database.commit()

    def _kept(self) -> dict[str, tuple[Any, ...]]:
        with _database() as database:
            query = "SELECT names, entries FROM folders WHERE folder = ?"
            row = database.execute(query, (self.folder,)).fetchone() if database else None
        if row is None:
            return {}
        return dict(zip(row[0].decode(errors="surrogateescape").split("\0"), ENTRY.iter_unpack(row[1]), strict=True))


def times_of(status: os.stat_result) -> FileTimes:
    """Return the size, times and inode of a file, given its status, links followed."""
    # Of a file from before 1970, too, an unsigned number.
    return status.st_size, status.st_mtime_ns % 2**64, status.st_ctime_ns, status.st_ino


def _key(path: str, status: os.stat_result) -> str:
    return f"{path!r}|{status.st_size}|{status.st_mtime_ns}|{status.st_ctime_ns}|{status.st_ino}"


class _Job:
    """Hashing of several files in threads, which another thread can stop."""

    def __init__(self, total_bytes: int) -> None:
        self._total_bytes = total_bytes
        self._done_bytes = 0
        self._reported_s = time.monotonic()
        self._lock = threading.Lock()
        self._stopped = threading.Event()

    def stop(self) -> None:
        self._stopped.set()

    def hash(self, path: Path | str) -> str:
        """Return a file's sha256 hex digest, if unchanged from the cache; after `stop`, which ends reading, wrong."""
        status = os.stat(path)  # noqa: PTH116 (half as fast)
        if status.st_size < MIN_CACHED_BYTES:
            return self._read(path)
        key = _key(os.path.realpath(path), status)
        known = _lookup(key)
        if known:
            self._count(status.st_size)
            return known
        # By the status from before: if the file changes while it is read, its next status makes another key.
        settled = time.time() - max(status.st_mtime, status.st_ctime) > SETTLED_S
        digest = self._read(path)
        if settled and not self._stopped.is_set():
            _keep(key, digest)
        return digest

    def _read(self, path: Path | str) -> str:
        hasher = hashlib.sha256()
        with open(path, "rb", buffering=0) as stream:  # noqa: PTH123 (half as fast)
            while not self._stopped.is_set() and (chunk := stream.read(CHUNK_BYTES)):
                hasher.update(chunk)
                self._count(len(chunk))
        return hasher.hexdigest()

    def _count(self, num_bytes: int) -> None:
        with self._lock:
            self._done_bytes += num_bytes
            now_s = time.monotonic()
            if now_s - self._reported_s >= REPORT_INTERVAL_S:
                self._reported_s = now_s
                done, total = self._done_bytes / GIB, self._total_bytes / GIB
                say(f"hashing files from outside the store: {done:.1f} of {total:.1f} GiB", sys.stderr)


def _lookup(key: str) -> str | None:
    with _database() as database:
        row = database.execute("SELECT sha256 FROM hashes WHERE file = ?", (key,)).fetchone() if database else None
    return row[0] if row else None


def _keep(key: str, digest: str) -> None:
    with _database() as database:
        if database:
            database.execute("INSERT OR REPLACE INTO hashes VALUES (?, ?)", (key, digest))
            database.commit()


@contextmanager
def _database() -> Iterator[sqlite3.Connection | None]:
    """Open the database of file hashes in `$LIFECYCLE_HOME`; yield None if it is not writable, so nothing is cached."""
    file = Path(os.environ.get("LIFECYCLE_HOME", ".lifecycle")).absolute() / "cache" / "hashes.sqlite"
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        opened = sqlite3.connect(file, timeout=5)
        opened.execute("CREATE TABLE IF NOT EXISTS hashes (file TEXT PRIMARY KEY, sha256 TEXT NOT NULL)")
        opened.execute("CREATE TABLE IF NOT EXISTS folders (folder TEXT PRIMARY KEY, names BLOB, entries BLOB)")
    except (OSError, sqlite3.Error):
        yield None
        return
    with closing(opened):
        yield opened
