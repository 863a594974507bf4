"""Cache of finished folders, keyed by everything that decides their content: one process makes an entry, others wait.

A disk may return other bytes than were written, and training would learn them. So files and folders of a cache get a
seal (sha256), which is compared when they are read. `key_parts` lists what decides the tokens of a dataset.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path

from filelock import FileLock
from pydantic import JsonValue

from stages.core.cache_entries import note_use
from stages.core.files import write_atomically
from stages.data.config import DataConfig, RowKind
from stages.data.files import Portion

KEY_CHARACTERS = 32
SEAL = ".sha256"
PREPARATION_VERSION = 10
"""Version of the preparation code; raised when the same input would give other tokens, masks or rows than before."""
TOKENIZER_FILES = (
    "config.json",
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab*",
    "merges.txt",
    "*.model",
)
TEMPLATE_FILES = ("chat_template*",)
OPTIONS = {
    "format",
    "columns",
    "template_date",
    "train_on",
    "turns",
    "sequence_length",
    "special_tokens_in_content",
    "packing",
    "over_long",
    "on_bad_rows",
    "max_bad_row_fraction",
}


def content_key(parts: dict[str, JsonValue]) -> str:
    """Return a cache key that depends on `parts` and on nothing else."""
    canonical = json.dumps(parts, sort_keys=True, ensure_ascii=True)
    return hashlib.sha256(canonical.encode()).hexdigest()[:KEY_CHARACTERS]


def file_digest(path: Path) -> str:
    """Return the sha256 of a file's content."""
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def cached_folder(cache: Path, key: str, is_complete: Callable[[Path], bool], make: Callable[[Path], None]) -> Path:
    """Return the folder `cache/key`; unless it is complete, `make` fills an empty sibling, which is then renamed.

    Leftovers of an interrupted or failed `make` are removed, at the latest by the next one.
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


def write_seal(entry: Path) -> None:
    """Write down the digest of a finished file beside it, or of all files of a finished folder within it."""
    write_atomically(_seal_of(entry), json.dumps(_digests(entry)))


def is_sealed(entry: Path) -> bool:
    """Return whether a file or folder was finished, be it intact or not."""
    return entry.exists() and _seal_of(entry).is_file()


def is_intact(entry: Path) -> bool:
    """Return whether a file or folder still has the content of its seal; if so, note its use."""
    try:
        intact = bool(json.loads(_seal_of(entry).read_bytes()) == _digests(entry))
    except (OSError, ValueError):
        return False
    if intact:
        note_use(entry)
        note_use(_seal_of(entry))
    return intact


def _seal_of(entry: Path) -> Path:
    return entry / SEAL if entry.is_dir() else entry.with_name(entry.name + SEAL)


def _digests(entry: Path) -> dict[str, str]:
    paths = [path for path in entry.iterdir() if path.name != SEAL] if entry.is_dir() else [entry]
    return {path.name: file_digest(path) for path in sorted(paths)}


def key_parts(portion: Portion, config: DataConfig, tokenizer_folder: Path, rows: RowKind) -> dict[str, JsonValue]:
    """Return all that decides the tokens, the rows and the list of bad rows, except the data files."""
    template = config.chat_template
    tokenizer_files = TOKENIZER_FILES if template else TOKENIZER_FILES + TEMPLATE_FILES
    return {
        "preparation": PREPARATION_VERSION,
        "libraries": {name: version(name) for name in ("tokenizers", "transformers", "numpy")},
        "portion": [portion.name, portion.fraction],
        "options": config.model_dump(mode="json", include=OPTIONS),
        "preference": {"examples": False, "pairs": True}.get(rows, rows),  # as caches that exist have it
        "tokenizer": {
            path.name: file_digest(path)
            for pattern in tokenizer_files
            for path in sorted(tokenizer_folder.glob(pattern))
            if path.is_file()
        },
        "chat_template": file_digest(template) if template and template.is_file() else None,
    }
