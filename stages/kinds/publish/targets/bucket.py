"""Publishing target in object storage (`s3://`, `gs://`, `az://`): one object for each file, below a prefix.

Credentials come from the environment. An object whose upload was cut off does not exist.
"""

import hashlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

from stages.core.errors import DownloadError, PublishError
from stages.hubs.listing import Digest
from stages.hubs.registry import parse_source
from stages.kinds.publish.targets.target import Address, LocalFile, LocalFiles, Names, Sent, TargetContents
from stages.remote.buckets import FILESYSTEMS, explained

NUM_CONNECTIONS = 4
CHUNK_BYTES = 8 << 20


class Prefix:
    """Publishing target below a prefix in a bucket of object storage.

    Objects are read back to be hashed: for an upload in several parts, the storage has no sha256 of the whole.
    """

    def __init__(self, address: Address) -> None:
        self._address = address
        self._source = parse_source(str(address), "model")
        self._bucket = address.place.partition("/")[0]
        with self._explained():
            self._filesystem = FILESYSTEMS[address.scheme](self._bucket)

    def check(self) -> None:
        """Check that the bucket exists and can be listed; missing write permission shows only at the first upload."""
        from pyarrow.fs import FileType

        with self._explained():
            (bucket,) = self._filesystem.get_file_info([self._bucket])
        if bucket.type == FileType.NotFound:
            raise PublishError(
                f"publishing to {self._address}: there is no bucket {self._bucket}; make it, or name another"
            )

    def prepare(self, licence: str | None) -> None:
        """Do nothing: a prefix in a bucket need not be created before an object is written."""

    def held(self, expected: LocalFiles) -> TargetContents:
        from pyarrow.fs import FileSelector, FileType

        with self._explained():
            found = self._filesystem.get_file_info(
                FileSelector(self._address.place, allow_not_found=True, recursive=True)
            )
            start = len(self._address.place) + 1
            sizes = {one.path[start:]: one.size for one in found if one.type == FileType.File}
            # Only these are read back: one of another size is another file.
            same_size = [name for name, file in expected.items() if sizes.get(name) == file.size_bytes]
            with ThreadPoolExecutor(NUM_CONNECTIONS) as pool:
                sums = dict(zip(same_size, pool.map(self._sha256, same_size), strict=True))
        return TargetContents({name: Digest("sha256", sums[name]) if name in sums else None for name in sizes})

    def read_text(self, name: str) -> str | None:
        with self._explained(), self._filesystem.open_input_stream(self._path(name)) as stream:
            return bytes(stream.read()).decode("utf-8", errors="replace")

    def send(self, files: LocalFiles, missing: Names, stale: Names, sent: Sent) -> None:
        with self._explained():
            for name in missing:
                self._write(files[name], name, sent)
            for name in stale:
                self._filesystem.delete_file(self._path(name))

    def _write(self, file: LocalFile, name: str, sent: Callable[[int], None]) -> None:
        with file.path.open("rb") as source, self._filesystem.open_output_stream(self._path(name)) as stream:
            while chunk := source.read(CHUNK_BYTES):
                stream.write(chunk)
                sent(len(chunk))

    def _sha256(self, name: str) -> str:
        hasher = hashlib.sha256()
        with self._filesystem.open_input_stream(self._path(name)) as stream:
            while chunk := stream.read(CHUNK_BYTES):
                hasher.update(chunk)
        return hasher.hexdigest()

    def _path(self, name: str) -> str:
        return f"{self._address.place}/{name}"

    @contextmanager
    def _explained(self) -> Iterator[None]:
        try:
            with explained(str(self._source)):
                yield
        except DownloadError as error:
            raise PublishError(f"publishing to {self._address}: {error}") from None


def open_target(address: Address, *, private: bool) -> Prefix:
    """Open a prefix in a bucket as publishing target; its policy decides who may read, whatever `private` says."""
    return Prefix(address)
