"""Contents of artifacts: file hashes, the digest over them, and checks against what was recorded."""

import errno
import hashlib
import os
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from pydantic import ConfigDict, with_config
from typing_extensions import TypedDict

from flows.recipe.version import canonical_json
from stages.core.approval import APPROVAL_FILE
from stages.core.fields import Product
from stages.core.hashing import sha256_of_files
from stages.core.metric_series import METRICS_FILE

RECORD_FILE = "record.json"
PENDING_RECORD_FILE = ".record.json"
PENDING_HOOK_FILE = ".hook"
UNSENT_FILE = ".unsent"
ATTEMPT_FILE = "attempt.json"
LOG_FILE = "log.txt"
SCRATCH_FOLDER = "scratch"
LAUNCH_FOLDER = ".launch"
NOT_OF_THE_ARTIFACT = frozenset(
    {
        *(RECORD_FILE, PENDING_RECORD_FILE, PENDING_HOOK_FILE, UNSENT_FILE, APPROVAL_FILE),
        *(ATTEMPT_FILE, LOG_FILE, SCRATCH_FOLDER, LAUNCH_FOLDER),
    }
)
SERIES = frozenset({METRICS_FILE, "events.jsonl"})
"""Names of files to which every attempt to run a stage appends: metrics and events."""
BOOKKEEPING = frozenset({"config.json", *SERIES, "result.json"})
"""Names of files beside an artifact's content, such as its config and metrics, which differ from build to build."""

CONTENT_FOLDERS: dict[Product, str] = {"model": "model/", "adapter": "adapter/", "dataset": "data/"}
HASHING_THREADS = 4
MAX_OUTSIDE_FILES = 10_000


@with_config(ConfigDict(extra="forbid"))
class FileEntry(TypedDict):
    """Recorded size in bytes and sha256 of one file of an artifact: a dict, as a record may have 100,000."""

    size: int
    sha256: str


Files = dict[str, FileEntry]
"""Recorded sizes and hashes of an artifact's files, by POSIX path relative to its folder."""


def files_in(folder: Path) -> Iterator[tuple[str, Path]]:
    """Yield the relative POSIX path and full path of an artifact's files, without logs: servers write on to them."""
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder)
        if name.parts[0] not in NOT_OF_THE_ARTIFACT and path.suffix != ".log" and not path.is_dir():
            yield name.as_posix(), path


def hash_files(folder: Path) -> Files:
    """Return the size and sha256 of every file of an artifact, by relative path."""
    files = dict(files_in(folder))
    # Threads suffice: hashlib lets others run while it hashes.
    with ThreadPoolExecutor(HASHING_THREADS) as pool:
        return dict(zip(files, pool.map(hash_file, files.values()), strict=True))


def hash_file(path: Path) -> FileEntry:
    """Return the size in bytes and the sha256 of a file."""
    with path.open("rb") as stream:
        digest = hashlib.file_digest(stream, "sha256").hexdigest()
        return FileEntry(size=stream.tell(), sha256=digest)


def hash_path(path: Path, limit_s: float | None = None) -> str:
    """Return the sha256 of a file, or of a folder's relative paths and contents. limit_s: as for `sha256_of_files`."""
    hashes = sha256_of_files(outside_files(path), limit_s)
    return _digest(hashes) if path.is_dir() else hashes[path.name]


def outside_files(path: Path) -> dict[str, Path]:
    """Return the files of an input outside the store, by relative path: a single file, or all files of a folder.

    Logs, records and compiled Python are left out. Raises `OSError` when the folder cannot be read, or has more than
    `MAX_OUTSIDE_FILES` files, as no input has.
    """
    if not path.is_dir():
        return {path.name: path}
    files: dict[str, Path] = {}
    for parent, _, names in os.walk(path, onerror=_fail):
        for name in names:
            relative = Path(parent, name).relative_to(path)
            if relative.parts[0] not in NOT_OF_THE_ARTIFACT and relative.suffix != ".log":
                files[relative.as_posix()] = path / relative
        if len(files) > MAX_OUTSIDE_FILES:
            raise OSError(errno.EFBIG, f"it holds more than {MAX_OUTSIDE_FILES:,} files; name the folder that is meant")
    return {name: file for name, file in files.items() if "__pycache__/" not in name}


def _fail(error: OSError) -> None:
    raise error


def content_digest(product: Product, files: Files) -> str:
    """Return the content digest of an artifact: one sha256 over all files that other stages may read from it.

    That is `model/`, `adapter/` or `data/`; of other products all files but the records.
    """
    # Every name begins with "".
    folder = CONTENT_FOLDERS.get(product, "")
    return _digest(
        {name: entry["sha256"] for name, entry in files.items() if name.startswith(folder) and name not in BOOKKEEPING}
    )


def is_pending(artifact: Path) -> bool:
    """Return whether an artifact's follow-up program, such as MLflow registration after promote, has yet to succeed."""
    return (artifact / PENDING_HOOK_FILE).exists()


def damage_of(folder: Path, files: Mapping[str, FileEntry]) -> tuple[str, ...]:
    """Return a sentence for each file that is missing or has another size than recorded, without reading content."""
    try:
        root = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    except OSError:
        return tuple(f"{name} is missing" for name in files)
    damage = []
    try:
        for name, entry in files.items():
            try:  # from the folder on, and without a Path, which is fastest: there may be 100,000
                num_bytes = os.stat(name, dir_fd=root, follow_symlinks=False).st_size
            except OSError:
                damage.append(f"{name} is missing")
                continue
            if num_bytes != entry["size"]:
                damage.append(f"{name} has {num_bytes} bytes instead of {entry['size']}")
    finally:
        os.close(root)
    return tuple(damage)


def _digest(hashes: dict[str, str]) -> str:
    return hashlib.sha256(canonical_json({**hashes}).encode()).hexdigest()
