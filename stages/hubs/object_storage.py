"""Hub for object storage (`s3://`, `gs://`, `az://`), which copies objects and detects changes by their ETags."""

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Event

from stages.core.contract import StageContext
from stages.core.errors import DownloadError, full_disk_named
from stages.hubs.delivery import (
    GIB,
    SMALL_FILE_BYTES,
    Progress,
    arrivals_folder,
    check_disk,
    check_small,
    move_into_place,
    size_bytes,
)
from stages.hubs.hub import Request, Source
from stages.hubs.listing import content_hash, path_in, select_files
from stages.remote.buckets import Bucket, StoredObject, check_listening, explained
from stages.remote.pointers import Pointer

NUM_CONNECTIONS = 4
CHUNK_BYTES = 8 << 20


class ObjectStorage:
    """Hub for object storage; a revision is a hash of the names, sizes and ETags of the requested objects."""

    def resolve_revision(self, request: Request) -> str:
        if request.limit_s is not None:
            check_listening(str(request.source), request.limit_s)
        return _revision(_requested(request, Bucket(str(request.source))))

    def deliver(self, request: Request, revision: str, folder: Path, context: StageContext) -> None:
        bucket = Bucket(str(request.source))
        objects = _requested(request, bucket)
        _check_unchanged(request, objects, revision)
        total_bytes = sum(one.size_bytes for one in objects.values())
        arrivals = arrivals_folder(context, revision)
        check_disk(context.work, total_bytes - size_bytes(arrivals))
        context.milestone(f"downloading {len(objects)} objects, {total_bytes / GIB:.3f} GiB")
        _copy_all(bucket, objects, arrivals, Progress(context, total_bytes))
        # Again after copying: an object that was replaced meanwhile may have come half from either version.
        _check_unchanged(request, _requested(request, bucket), revision)
        move_into_place(arrivals, objects.keys(), folder)

    def pointers(self, request: Request, revision: str) -> dict[str, Pointer]:
        objects = _requested(request, Bucket(str(request.source)))
        _check_unchanged(request, objects, revision)
        return {
            name: Pointer(address=f"{request.source.hub}://{one.path}", size_bytes=one.size_bytes, tag=one.tag)
            for name, one in objects.items()
        }

    def read_file(self, source: Source, revision: str, name: str) -> str | None:
        bucket = Bucket(str(source))
        listed = bucket.objects().get(name)
        if listed is None:
            return None
        check_small(listed.size_bytes, name, source)
        with explained(bucket.address), bucket.filesystem.open_input_file(listed.path) as stream:
            return bytes(stream.read(SMALL_FILE_BYTES)).decode()


HUB = ObjectStorage()


def _requested(request: Request, bucket: Bucket) -> dict[str, StoredObject]:
    objects = bucket.objects()
    return {name: objects[name] for name in select_files(request, list(objects))}


def _revision(objects: dict[str, StoredObject]) -> str:
    return content_hash((name, f"{one.size_bytes} {one.tag}") for name, one in objects.items())


def _check_unchanged(request: Request, objects: dict[str, StoredObject], revision: str) -> None:
    if _revision(objects) != revision:
        raise DownloadError(f"{request.source} changed after this refresh was planned; run it again")


def _copy_all(bucket: Bucket, objects: dict[str, StoredObject], folder: Path, progress: Progress) -> None:
    """Copy objects of a bucket into a folder, several at once; if one fails, stop the others."""
    stop = Event()

    def copy(name: str) -> None:
        try:
            _copy(bucket, objects[name], path_in(folder, name, bucket.address), progress, stop)
        except BaseException:
            stop.set()
            raise

    with explained(bucket.address), ThreadPoolExecutor(NUM_CONNECTIONS) as pool:
        for _ in pool.map(copy, sorted(objects, key=lambda name: -objects[name].size_bytes)):
            pass


def _copy(bucket: Bucket, source: StoredObject, target: Path, progress: Progress, stop: Event) -> None:
    """Copy an object of a bucket, resuming an earlier attempt. Raises DownloadError for another size than listed."""
    target.parent.mkdir(parents=True, exist_ok=True)
    with (
        full_disk_named(f"receiving {source.path}", target),
        target.open("ab") as file,
        bucket.filesystem.open_input_file(source.path) as stream,
    ):
        # Of what an earlier attempt wrote, a machine that died may have lost all after the last but one fsync.
        file.truncate(max(0, file.tell() - CHUNK_BYTES))
        progress.add(file.seek(0, os.SEEK_END))
        stream.seek(file.tell())
        while not stop.is_set() and (chunk := stream.read(CHUNK_BYTES)):
            file.write(chunk)
            file.flush()
            os.fsync(file.fileno())
            progress.add(len(chunk))
        if not stop.is_set() and file.tell() != source.size_bytes:
            raise DownloadError(
                f"receiving {source.path}: there were {source.size_bytes} bytes, but {file.tell()} came; run it again"
            )
