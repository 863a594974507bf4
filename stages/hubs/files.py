"""Hub for local files (`file://`), which copies a file or a folder and follows no link that leads out of it."""

import os
import re
import shutil
import stat
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

from stages.core.contract import StageContext
from stages.core.errors import DownloadError
from stages.core.hashing import FileTimes, digest_of_many, sha256_of_files, times_of
from stages.core.redaction import shortened
from stages.hubs.delivery import Progress, check_disk
from stages.hubs.hub import Request, Source
from stages.hubs.listing import content_hash, digest_of, path_in, select_files


class Files:
    """Hub for local files, which copies them; a revision is a hash of the names and contents of the copied files."""

    def resolve_revision(self, request: Request) -> str:
        root, times = _found(request)
        source = f"{os.path.realpath(root)} {replace(request, limit_s=None)}"
        try:
            return digest_of_many(source, times, lambda: content_hash(_hashes(request, root, times).items()))
        except OSError as error:
            raise DownloadError(f"{request.source} cannot be read: {error}") from error

    def deliver(self, request: Request, revision: str, folder: Path, context: StageContext) -> None:
        files = requested_files(request)
        total_bytes = sum(path.stat().st_size for path in files.values())
        check_disk(context.work, total_bytes)
        copy_files(files, folder, Progress(context, total_bytes).add)
        if hash_files({name: folder / name for name in files}) != revision:
            raise DownloadError(f"{request.source} changed after this refresh was planned; run it again")

    def read_file(self, source: Source, revision: str, name: str) -> str | None:
        path = Path(source.name) / name
        return path.read_text(encoding="utf-8") if path.is_file() else None


HUB = Files()
ALL_READ = stat.S_IRUSR | stat.S_IRGRP | stat.S_IROTH
USUAL_BITS, USUAL_MODE = 0o170000 | ALL_READ, stat.S_IFREG | ALL_READ
"""Bits of a status by which most files need no look of their own: they are regular, and all may read them."""
NOT_UTF8 = re.compile("[\ud800-\udfff]")
"""Characters by which Python stands for bytes of a file's name that are not UTF-8."""


def requested_files(request: Request) -> dict[str, Path]:
    """Return the paths of the requested local files, by name. Raises DownloadError."""
    root, times = _found(request)
    return {name: Path(root + name) for name in select_files(request, sorted(times))}


def requested_hashes(request: Request) -> tuple[str, dict[str, str]]:
    """Return the text before the names of the requested local files, and the sha256 of each. Raises DownloadError."""
    root, times = _found(request)
    return root, _hashes(request, root, times)


def _hashes(request: Request, root: str, times: Mapping[str, FileTimes]) -> dict[str, str]:
    selected = {name: times[name] for name in select_files(request, sorted(times))}
    return sha256_of_files({name: root + name for name in selected}, request.limit_s, selected)


def _found(request: Request) -> tuple[str, dict[str, FileTimes]]:
    """Return the times of local files by name, and the text before their names. Raises DownloadError.

    The name is that of a file, or its path in a folder. Of 100,000 pictures, each is looked at once, and has no Path.
    """
    path = Path(request.source.name)
    if not _exists(path):
        raise DownloadError(f"file://{path} does not exist; a relative path starts at the recipe's folder")
    if path == Path(path.anchor):
        raise DownloadError(f"file://{path} is all of this machine; name the folder that is meant")
    try:
        if path.is_dir():
            root, files = f"{path}/", _walk(path)
        else:
            root, status = str(path).removesuffix(path.name), path.stat()
            files = {path.name: times_of(status)}
            _check_readable_file(str(path), path, status)
    except OSError as error:
        raise DownloadError(f"file://{path} cannot be read: {error}") from error
    if not files:
        raise DownloadError(f"file://{path} is an empty folder")
    return root, files


def _exists(path: Path) -> bool:
    try:
        return path.exists()
    except OSError as error:
        raise DownloadError(f"file://{shortened(str(path), 200)} cannot be read: {error.strerror}") from error


def _walk(folder: Path) -> dict[str, FileTimes]:
    """Return the times of all files that are not hidden, by name. Raises DownloadError for a link out of the folder."""
    files: dict[str, FileTimes] = {}
    folders = [(str(folder), "")]
    while folders:
        parent, begin = folders.pop()
        with os.scandir(parent) as entries:
            for entry in entries:
                if entry.name.startswith("."):
                    continue
                name = begin + entry.name
                if not entry.is_file(follow_symlinks=False):  # which says for most that they are neither
                    if entry.is_symlink():
                        _check_link(Path(entry.path), folder)
                    if entry.is_dir():
                        folders.append((entry.path, f"{name}/"))
                        continue
                status = entry.stat()
                files[name] = times_of(status)
                if status.st_mode & USUAL_BITS != USUAL_MODE or not name.isascii():
                    _check_readable_file(entry.path, folder, status)
    return files


def _check_link(link: Path, folder: Path) -> None:
    """Raise DownloadError for a symbolic link that leads out of the copied folder, to a folder, or nowhere."""
    if not Path(os.path.realpath(link)).is_relative_to(folder.resolve()):
        raise DownloadError(f"{link} is a link that leads out of {folder}; put a copy there (`cp -rL`)")
    if link.is_dir() or not link.exists():
        where = f"to the folder {os.path.realpath(link)}" if link.is_dir() else "that leads nowhere, or to itself"
        raise DownloadError(f"{link} is a link {where}; remove it, or put a copy there (`cp -rL`)")


def _check_readable_file(file: str, source: Path, status: os.stat_result) -> None:
    """Raise DownloadError for an unreadable file, a name that is not UTF-8, or a pipe or device, which has no end."""
    if not file.isascii() and NOT_UTF8.search(file):
        raise DownloadError(f"the name of the file {os.fsencode(file)!r} is not UTF-8; rename it")
    if not stat.S_ISREG(status.st_mode):
        raise DownloadError(f"{file} in file://{source} is not a regular file; remove it")
    # Asking the system about each costs as much as the status, which mostly says that all may read it.
    if status.st_mode & ALL_READ != ALL_READ and not os.access(file, os.R_OK):
        raise DownloadError(f"{file} in file://{source} may not be read; change its permissions")


def hash_files(files: dict[str, Path]) -> str:
    """Return one hash of the names and contents of files, reading several at once."""
    with ThreadPoolExecutor() as pool:
        digests = pool.map(digest_of, files.values())
    return content_hash(zip(files, (digest.hex for digest in digests), strict=True))


def copy_files(files: Mapping[str, Path], folder: Path, report: Callable[[int], None]) -> None:
    """Copy files into a folder under the given names; `report` is called with the number of bytes of each file."""
    for name, path in files.items():
        target = path_in(folder, name, f"file://{path}")
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, target)
        report(target.stat().st_size)
