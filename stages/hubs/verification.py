"""Digests: of one file, as a hub promises it, and of a set of files, as a version needs it."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from stages.core.hashing import content_hasher


@dataclass(frozen=True)
class Digest:
    """What the content of a file must hash to. Git blobs are hashed with a header that holds their size."""

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
    """One sha256 over the names and the sha256 of several files, in any order."""
    lines = "".join(f"{sha256} {name}\n" for name, sha256 in sorted(digests))
    return hashlib.sha256(lines.encode()).hexdigest()
