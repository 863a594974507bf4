"""Folder of a dataset as the source of its rows' media: each is found inside of it, bounded, hashed and decoded.

Nothing is fetched: a row names files beside it, or holds the encoded bytes itself.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, cast

from stages.core.errors import DataError
from stages.core.redaction import quoted
from stages.data.files import RowLocation, holds_rows
from stages.data.media.addresses import FORMS
from stages.data.media.embedded import embedded_bytes, is_embedded, place_of, read_embedded
from stages.data.media.images import PictureError, as_data_address
from stages.data.media_reference import MAX_PATH_BYTES, MediaReference
from stages.data.messages import RowError, kind_of
from stages.models.media import NOUNS, SHOWN_TO_ANY, MediaError, MediaKind, MediaSize, Medium, Sampling, in_words
from stages.remote.pointers import SUFFIX, open_file

if TYPE_CHECKING:
    from PIL.Image import Image

ADDRESS = re.compile(r"[a-zA-Z][a-zA-Z0-9+.-]*://")
FILE_ADDRESS = re.compile(r"file://(localhost(?=/))?")
MAX_QUOTED = 80
COPIES = "media"
"""Folder, in that of rows, of media that came with them from another dataset, under their digests."""


@dataclass(frozen=True)
class MediaFolder:
    """Folder of a dataset, out of which no path of a row may lead.

    bases: folders from which relative paths start, in order: the dataset's, and those of its data files. by_header:
    pictures are measured by their headers, for those who only look at rows.
    """

    root: Path
    bases: tuple[Path, ...]
    by_header: bool = False

    @classmethod
    def of(cls, root: Path, files: Iterable[Path], *, by_header: bool = False) -> MediaFolder:
        return cls(root, tuple(dict.fromkeys((root, *(path.parent for path in files)))), by_header)

    def listing_digest(self) -> str:
        """Return a digest of paths, sizes and times of change of all files but those of rows; none is read."""
        listing: list[tuple[str, int, int]] = []
        folders = [("", os.fspath(self.root))]
        while folders:
            prefix, folder = folders.pop()
            with os.scandir(folder) as entries:
                for entry in entries:
                    with suppress(OSError):  # of a link to nothing or to itself: no row can name it
                        if entry.is_dir():
                            folders.append((f"{prefix}{entry.name}/", entry.path))
                        elif not holds_rows(entry.name):
                            status = entry.stat()
                            listing.append((prefix + entry.name, status.st_size, status.st_mtime_ns))
        return hashlib.sha256(json.dumps(sorted(listing)).encode()).hexdigest()

    def reference(self, kind: MediaKind, source: object, row: RowLocation | None) -> MediaReference:
        """Return the reference to one medium, given a row's cell or part: checked, hashed and measured.

        row: where the row is, for media whose bytes are inside of it; None for readers that only look. Raises RowError
        for what is missing, unreadable, outside of the folder, or refused by `inspect_picture`.
        """
        try:
            data = embedded_bytes(source)
            if data is not None:
                return self._reference(kind, place_of(self.root, row) if row else "", data)
        except MediaError as error:
            raise RowError(f"has a {NOUNS[kind]} inside of it, which {error}") from error
        path = _path_of(kind, source)
        file = self._found(path)
        place = file.relative_to(self._real_root).as_posix()
        if len(place.encode()) > MAX_PATH_BYTES:
            raise RowError(f"has a path of more than {MAX_PATH_BYTES:,} bytes as {kind}; expected a shorter one")
        try:
            return self._reference(kind, place.removesuffix(SUFFIX), _read(file, FORMS[kind].max_bytes))
        except MediaError as error:
            raise RowError(f"has the {NOUNS[kind]} {quoted(path, MAX_QUOTED)}, which {error}") from error

    def load(self, reference: MediaReference, sampling: Sampling | None = None) -> Medium:
        """Return the decoded medium: a picture in RGB, else what a model's processor takes of it (`sampling`).

        Raises DataError as `encoded` does.
        """
        data = self.encoded(reference)
        try:
            return FORMS[reference.kind].decode(data, reference.size, sampling)
        except MediaError as error:
            raise DataError(f"the {NOUNS[reference.kind]} {reference.path} of {self.root} {error}") from error

    def load_image(self, reference: MediaReference) -> Image:
        """Return the decoded picture, RGB. Raises DataError as `encoded` does, and for media of another kind."""
        if reference.kind not in SHOWN_TO_ANY:
            noun, read = NOUNS[reference.kind], in_words(SHOWN_TO_ANY)
            raise DataError(f"{reference.path} of {self.root} is a {noun}, where {read} alone are read; remove its row")
        return cast("Image", self.load(reference))

    def encoded(self, reference: MediaReference) -> bytes:
        """Return the bytes of a medium. Raises DataError if it is gone, or has changed since the rows were read."""
        noun = NOUNS[reference.kind]
        try:
            if is_embedded(reference.path):
                data = read_embedded(self.root, reference.path, reference.sha256)
            else:
                data = _read(self._found(reference.path), FORMS[reference.kind].max_bytes)
        except (OSError, ValueError) as error:  # of a file that is gone, or holds something else now
            raise DataError(f"the {noun} {reference.path} of {self.root} cannot be read: {error}") from error
        if data is None or hashlib.sha256(data).hexdigest() != reference.sha256:
            raise DataError(
                f"the {noun} {reference.path} of {self.root} has changed since its row was read; put it back, or "
                "download the dataset again"
            )
        return data

    def data_address(self, reference: MediaReference) -> str:
        """Return a picture as a `data:` address for a request. Raises DataError as `encoded` does."""
        try:
            return as_data_address(self.encoded(reference))
        except PictureError as error:
            raise DataError(f"the picture {reference.path} of {self.root} {error}") from error

    def copied(self, reference: MediaReference, target: Path) -> str:
        """Copy a medium into another dataset's folder, once, and return its path there. Raises as `encoded` does."""
        path = target / COPIES / reference.sha256
        if not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(self.encoded(reference))
        return path.relative_to(target).as_posix()

    def _reference(self, kind: MediaKind, path: str, data: bytes) -> MediaReference:
        return MediaReference.of(path, hashlib.sha256(data).hexdigest(), self._size(kind, data))

    def _size(self, kind: MediaKind, data: bytes) -> MediaSize:
        return FORMS[kind].inspect(data, self.by_header)

    @cached_property
    def _real_root(self) -> Path:
        return self.root.resolve()

    def _found(self, path: str) -> Path:
        """Return the real path of a row's file. Raises RowError unless it is a file inside the dataset's folder."""
        root = self._real_root
        for base in self.bases:
            for name in (path, path + SUFFIX):
                try:
                    real = (base / name).resolve()
                    is_file = real.is_file()
                except (OSError, ValueError, RuntimeError):  # too long, a null byte, a circle of links
                    continue
                if is_file and not real.is_relative_to(root):
                    raise RowError(
                        f"has the path {quoted(path, MAX_QUOTED)}, which leads out of the dataset's folder; expected a "
                        "file inside of it: copy it there, and name it from there"
                    )
                if is_file:
                    return real
        if not Path(os.path.normpath(root / path)).is_relative_to(root):
            raise RowError(
                f"has the path {quoted(path, MAX_QUOTED)}, which leads out of the dataset's folder; expected a path "
                "inside of it"
            )
        raise RowError(
            f"has the path {quoted(path, MAX_QUOTED)}, where there is no file; expected one in the dataset's folder, "
            "or beside the data file (a download fetches them with `media: true`)"
        )


def _read(file: Path, max_bytes: int) -> bytes:
    try:
        with open_file(file) as stream:
            return stream.read(max_bytes + 1)
    except OSError as error:
        raise MediaError(f"cannot be read: {error.strerror}; make it readable") from error


def _path_of(kind: MediaKind, source: object) -> str:
    """Return the path that a row names, from its forms: a string, or {path}, {url} (OpenAI). Raises RowError."""
    if isinstance(source, dict):
        source = next((source[key] for key in ("url", "path") if source.get(key)), source)
    if not isinstance(source, str) or not source:
        raise RowError(
            f"has {kind_of(source)} as {kind}; expected a path, base64 as `data:{kind}/…;base64,…`, or an object with "
            "one of these as `path` or `url`, or with binary `bytes`"
        )
    if beginning := FILE_ADDRESS.match(source):
        return source[beginning.end() :]
    if ADDRESS.match(source):
        raise RowError(
            f"has the address {quoted(source, MAX_QUOTED)} as {kind}; nothing is fetched while data are read: put the "
            "files into the dataset's folder, and name them"
        )
    return source
