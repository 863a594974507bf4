"""Finished folders, keyed by what they were made from: one process makes an entry, the others wait and find it."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path

from filelock import FileLock
from pydantic import JsonValue

KEY_CHARACTERS = 32


def content_key(parts: dict[str, JsonValue]) -> str:
    """A name for what is made from `parts`, and from nothing else."""
    canonical = json.dumps(parts, sort_keys=True, ensure_ascii=True)
    return hashlib.sha256(canonical.encode()).hexdigest()[:KEY_CHARACTERS]


def file_digest(path: Path) -> str:
    """sha256 of a file's content."""
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def cached_folder(cache: Path, key: str, is_complete: Callable[[Path], bool], make: Callable[[Path], None]) -> Path:
    """The folder `cache/key`, made by `make` in an empty sibling and renamed, unless it is there and complete.

    What an interrupted or failed `make` left behind is removed, at the latest by the next one.
    """
    entry = cache / key
    if is_complete(entry):
        return entry
    cache.mkdir(parents=True, exist_ok=True)
    with FileLock(cache / f".{key}.lock", fallback_to_soft=False):
        if is_complete(entry):
            return entry
        partial = cache / f".{key}.partial"
        for stale in (partial, entry):
            shutil.rmtree(stale, ignore_errors=True)
        partial.mkdir()
        try:
            make(partial)
            partial.rename(entry)
        finally:
            shutil.rmtree(partial, ignore_errors=True)
    return entry
