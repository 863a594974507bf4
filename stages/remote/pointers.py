"""Pointer files, which stand for remote files: each holds an address, with size and tag when the download was planned.

`train.jsonl.pointer` is opened like `train.jsonl`, over the network, without writes to disk.Credentials: environment.
"""

import importlib
import io
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import BinaryIO

from pydantic import NonNegativeInt

from stages.core.fields import StrictModel

SUFFIX = ".pointer"
BUFFER_BYTES = 1 << 20
"""Number of bytes that each read of a remote file requests."""
MODULES = {
    "s3": "stages.remote.buckets",
    "gs": "stages.remote.buckets",
    "az": "stages.remote.buckets",
    "hf": "stages.remote.hub_file",
}
"""Module that opens remote files, by the scheme of their address; a late import, as it takes a second."""

Opened = Callable[["Pointer"], AbstractContextManager[io.RawIOBase]]


class Pointer(StrictModel):
    """Pointer to a remote file: its address, size, and a tag that changes with its content.

    address: `s3://BUCKET/PATH`, or `hf://datasets/org/name@COMMIT/PATH`. tag: ETag, generation, or digest.
    """

    address: str
    size_bytes: NonNegativeInt
    tag: str


def write_pointer(path: Path, pointer: Pointer) -> None:
    """Write a pointer file beside the path of the local file that it stands for."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.with_name(path.name + SUFFIX).write_text(pointer.model_dump_json(indent=2) + "\n", encoding="utf-8")


def read_pointer(path: Path) -> Pointer:
    """Return the remote address, size and tag that a pointer file holds. Raises ValueError for any other content."""
    return Pointer.model_validate_json(path.read_text(encoding="utf-8"))


def is_pointer(path: Path) -> bool:
    """Return whether a path is a pointer file, by its suffix."""
    return path.suffix == SUFFIX


def without_pointer(path: Path) -> Path:
    """Return the path without the suffix `.pointer` of a pointer file, which stands for a remote file."""
    return path.with_suffix("") if is_pointer(path) else path


def size_bytes(path: Path) -> int:
    """Return a file's size in bytes; for a pointer file, the size of the remote file that it stands for."""
    return read_pointer(path).size_bytes if is_pointer(path) else path.stat().st_size


@contextmanager
def open_file(path: Path) -> Iterator[BinaryIO]:
    """Open a local file, or the remote file that a pointer file stands for, for reading at any position.

    Raises DownloadError where it is gone, forbidden, or changes; TransientError for no answer.
    """
    if not is_pointer(path):
        with path.open("rb") as file:
            yield file
        return
    pointer = read_pointer(path)
    opened: Opened = importlib.import_module(MODULES[pointer.address.partition("://")[0]]).opened
    with opened(pointer) as file:
        yield io.BufferedReader(file, BUFFER_BYTES)
