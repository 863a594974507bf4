"""An object of a bucket as a file that is read in ranges, by pyarrow's filesystems."""

from __future__ import annotations

import io
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from stages.core.errors import DataError, DownloadError
from stages.remote.buckets import Bucket, explained
from stages.remote.pointers import Pointer

if TYPE_CHECKING:
    from pyarrow import NativeFile


@contextmanager
def opened(pointer: Pointer) -> Iterator[io.RawIOBase]:
    """What `open_file` gives. An object that is replaced meanwhile is found out at the end: ranges are asked for by
    name alone."""
    bucket = Bucket(pointer.address)
    _check(bucket, pointer)
    with explained(pointer.address):
        stream = bucket.filesystem.open_input_file(bucket.path)
    with stream:
        try:
            yield _ObjectFile(stream, pointer.address)
        except DataError:
            _check(bucket, pointer)  # of two contents mixed, this is why
            raise
        _check(bucket, pointer)


def _check(bucket: Bucket, pointer: Pointer) -> None:
    """Raises DownloadError for an object that is not what it was."""
    with explained(pointer.address):
        now = bucket.look_at(bucket.path)
    if (now.size_bytes, now.tag) != (pointer.size_bytes, pointer.tag):
        raise DownloadError(
            f"{pointer.address} changed: it had {pointer.size_bytes:,} bytes (ETag {pointer.tag}) when its download "
            f"was planned, and has {now.size_bytes:,} now (ETag {now.tag}); run the refresh again, which takes what is "
            "there, once what writes it is done"
        )


class _ObjectFile(io.RawIOBase):
    """What pyarrow reads, with its errors explained."""

    def __init__(self, stream: NativeFile, address: str) -> None:
        self._stream = stream
        self._address = address

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        with explained(self._address):
            return int(self._stream.readinto(buffer))

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        return int(self._stream.seek(offset, whence))

    def tell(self) -> int:
        return int(self._stream.tell())
