"""Checks of the names, sizes and digests that hubs list for their files. A hub, a mirror or a proxy may lie."""

from __future__ import annotations

import hashlib
import unicodedata
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Annotated, Literal

from pydantic import Field

from stages.core.errors import DownloadError
from stages.core.hashing import content_hasher
from stages.core.redaction import quoted

FileSize = Annotated[int, Field(ge=0, lt=2**63)]
Sha1 = Annotated[str, Field(pattern=r"^[0-9a-f]{40}$")]
Sha256 = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]

MAX_PART_BYTES = 240
"""Longest name of a folder or file: file systems take 255 bytes, and `.partial` or `.pointer` follows."""
MAX_NAME_BYTES = 2000
"""Longest name with its folders: a path may have 4,096 bytes, and it lies below our own folders."""
PARTIAL_SUFFIX = ".partial"
"""End of the name of a file that is arriving."""
QUOTED_CHARACTERS = 200


def path_in(folder: Path, name: str, source: object) -> Path:
    """Return the path of a file that a hub names, below the folder that it is for.

    Raises DownloadError for a name that leads somewhere else, also by links that are there already, and for one that
    cannot be written.
    """
    check_name(name, source)
    path = folder / name
    if not path.resolve().is_relative_to(folder.resolve()):
        raise DownloadError(
            f"{source} lists a file {quoted(name, QUOTED_CHARACTERS)} that leads out of its folder by a link in "
            f"{folder}; remove that link, and run this again"
        )
    return path


def check_name(name: str, source: object) -> None:
    """Raise DownloadError unless a name is a path of a file below a folder."""
    if problem := _problem(name):
        raise DownloadError(
            f"{source} lists a file {quoted(name, QUOTED_CHARACTERS)} {problem}; nothing was downloaded. Expected a "
            "path below its folder; take another mirror or revision, or ask its owner to rename the file"
        )


def check_names(names: Iterable[str], source: object) -> None:
    """Raise DownloadError for a name that `check_name` refuses, and for one that is listed twice."""
    seen: set[str] = set()
    for name in names:
        check_name(name, source)
        if name in seen:
            raise DownloadError(
                f"{source} lists the file {quoted(name, QUOTED_CHARACTERS)} twice; take another mirror or revision"
            )
        seen.add(name)


def check_fit(names: Iterable[str], source: object) -> None:
    """Raise DownloadError when two of the files to be written want the same place."""
    files = set(names)
    for name in files:
        same_place = [*map(str, PurePosixPath(name).parents), f"{name}{PARTIAL_SUFFIX}"]
        if other := next((path for path in same_place if path in files), None):
            raise DownloadError(
                f"{source} lists {quoted(name, QUOTED_CHARACTERS)} and {quoted(other, QUOTED_CHARACTERS)}, and both "
                "cannot be written to one folder; take another mirror or revision, or name the files (`files`)"
            )


def _problem(name: str) -> str | None:
    """Return why a file below a folder cannot have this name; None if it can."""
    parts = name.split("/")
    if "" in parts or {".", ".."} & set(parts) or "\\" in name:
        return "that leads out of its folder, or is no plain path"
    if any(unicodedata.category(character) in ("Cc", "Cs") for character in name):
        return "with characters that no name of a file should have"
    num_bytes = max(len(part.encode()) for part in parts)
    if num_bytes > MAX_PART_BYTES or len(name.encode()) > MAX_NAME_BYTES:
        return f"whose name is too long to be written ({len(name.encode()):,} bytes)"
    return None


@dataclass(frozen=True)
class Digest:
    """Expected digest of a file's content. Git blobs are hashed with a header that holds their size."""

    algorithm: Literal["sha256", "git-blob-sha1"]
    hex: str


def digest_of_bytes(content: bytes, algorithm: Literal["sha256", "git-blob-sha1"]) -> Digest:
    """Hash the content of a file."""
    hasher = content_hasher(algorithm, len(content))
    hasher.update(content)
    return Digest(algorithm, hasher.hexdigest())


def digest_of(path: Path, algorithm: Literal["sha256", "git-blob-sha1"] = "sha256") -> Digest:
    """Hash a file."""
    hasher = content_hasher(algorithm, path.stat().st_size)
    with path.open("rb") as stream:
        return Digest(algorithm, hashlib.file_digest(stream, lambda: hasher).hexdigest())


def content_hash(digests: Iterable[tuple[str, str]]) -> str:
    """Return one sha256 over the names and the sha256 of several files, in any order."""
    lines = "".join(f"{sha256} {name}\n" for name, sha256 in sorted(digests))
    return hashlib.sha256(lines.encode()).hexdigest()
