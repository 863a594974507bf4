"""Checks and selection of the files that a hub lists; their names, sizes and digests are not trusted.

A model: its JSON, tokenizer, licence and safetensors; never pickles, and Python only when the recipe trusts it. A
dataset: JSONL, JSON and CSV, maybe compressed (`.gz`, `.zst`), and Parquet, and media where the recipe asks for
them; never loading scripts.
"""

import hashlib
import re
import unicodedata
from collections.abc import Iterable
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path, PurePosixPath
from typing import Annotated, Literal

from pydantic import Field

from stages.core.errors import DataError, DownloadError, ModelError
from stages.core.hashing import content_hasher
from stages.core.redaction import quoted, shortened
from stages.hubs.hub import Request, Source
from stages.models.media import SUFFIXES
from stages.models.model_folder import PICKLE_SUFFIXES

FileSize = Annotated[int, Field(ge=0, lt=2**63)]
Sha1 = Annotated[str, Field(pattern=r"^[0-9a-f]{40}$")]
Sha256 = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]

MAX_PART_BYTES = 240
"""Largest length in bytes of a file's or folder's name. File systems allow 255, and a suffix may be added."""
MAX_NAME_BYTES = 2000
"""Largest length in bytes of a file's path below the target folder; the system allows 4,096 for the whole path."""
PARTIAL_SUFFIX = ".partial"
"""Suffix of a file's name while it is being downloaded."""
QUOTED_CHARACTERS = 200
ODD = re.compile(r"^[/.]|[/][/.]|\\|/$|^$")
"""Signs of a name that may be no plain relative path."""
MAX_SHOWN_CHARACTERS = 500
_TEXT_DATA = (".jsonl", ".ndjson", ".json", ".csv")
_DATA_SUFFIXES = (".parquet", *(f"{suffix}{packed}" for suffix in _TEXT_DATA for packed in ("", ".gz", ".zst")))
_MEDIA_SUFFIXES = tuple(suffix for suffixes in SUFFIXES.values() for suffix in suffixes)
_MODEL_SUFFIXES = (".json", ".jinja", ".txt", ".model", ".tiktoken", ".md")
_DOCUMENTS = ("README.md", "LICENSE", "LICENSE.txt", "LICENSE.md", "NOTICE")
_DATASET_DESCRIPTIONS = ("dataset_infos.json", "dataset_info.json", "dataset_dict.json", "state.json")


def path_in(folder: Path, name: str, source: object) -> Path:
    """Return the local path for a file that a hub lists, safely below the target folder.

    Raises DownloadError for a name that leads elsewhere, also by existing links, or cannot be written.
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
    """Raise DownloadError for a file name that is not a plain relative path, such as one with `..`."""
    if problem := _problem(name):
        raise DownloadError(
            f"{source} lists a file {quoted(name, QUOTED_CHARACTERS)} {problem}; nothing was downloaded. Expected a "
            "path below its folder; take another mirror or revision, or ask its owner to rename the file"
        )


def check_names(names: Iterable[str], source: object) -> None:
    """Raise DownloadError for a listed file name that is unsafe or occurs twice."""
    seen: set[str] = set()
    for name in names:
        check_name(name, source)
        if name in seen:
            raise DownloadError(
                f"{source} lists the file {quoted(name, QUOTED_CHARACTERS)} twice; take another mirror or revision"
            )
        seen.add(name)


def check_fit(names: Iterable[str], source: object) -> None:
    """Raise DownloadError if two files of a download would be written to the same local path."""
    files = set(names)
    unfinished = {name.removesuffix(PARTIAL_SUFFIX): name for name in files if name.endswith(PARTIAL_SUFFIX)}
    parents: dict[str, str | None] = {}
    for name in files:
        folder = name.rpartition("/")[0]
        if folder not in parents:  # a file where those in it need a folder
            parents[folder] = next((path for path in map(str, PurePosixPath(name).parents) if path in files), None)
        if other := parents[folder] or unfinished.get(name):
            raise DownloadError(
                f"{source} lists {quoted(name, QUOTED_CHARACTERS)} and {quoted(other, QUOTED_CHARACTERS)}, and both "
                "cannot be written to one folder; take another mirror or revision, or name the files (`files`)"
            )


def _problem(name: str) -> str | None:
    """Return why a listed file name is unsafe or too long; None if it is not."""
    if name.isascii() and name.isprintable() and len(name) <= MAX_PART_BYTES and not ODD.search(name):
        return None  # most names, of which there may be 100,000
    parts = name.split("/")
    if "" in parts or {".", ".."} & set(parts) or "\\" in name:
        return "that leads out of its folder, or is no plain path"
    is_plain = name.isprintable() and name.isascii()
    # Control characters, surrogates.
    if not is_plain and any(unicodedata.category(character) in ("Cc", "Cs") for character in name):
        return "with characters that no name of a file should have"
    num_bytes = max(len(part.encode()) for part in parts)
    if num_bytes > MAX_PART_BYTES or len(name.encode()) > MAX_NAME_BYTES:
        return f"whose name is too long to be written ({len(name.encode()):,} bytes)"
    return None


@dataclass(frozen=True)
class Digest:
    """Digest to which a downloaded file is compared. A git blob id is a hash that also covers the file's size."""

    algorithm: Literal["sha256", "git-blob-sha1"]
    hex: str


def digest_of_bytes(content: bytes, algorithm: Literal["sha256", "git-blob-sha1"]) -> Digest:
    """Return the digest of some bytes in memory."""
    hasher = content_hasher(algorithm, len(content))
    hasher.update(content)
    return Digest(algorithm, hasher.hexdigest())


def digest_of(path: Path, algorithm: Literal["sha256", "git-blob-sha1"] = "sha256") -> Digest:
    """Return the digest of a file's content."""
    hasher = content_hasher(algorithm, path.stat().st_size)
    with path.open("rb") as stream:
        return Digest(algorithm, hashlib.file_digest(stream, lambda: hasher).hexdigest())


def content_hash(digests: Iterable[tuple[str, str]]) -> str:
    """Return one sha256 for several files, given their names and digests, independent of their order."""
    lines = "".join(f"{sha256} {name}\n" for name, sha256 in sorted(digests))
    return hashlib.sha256(lines.encode()).hexdigest()


def select_files(request: Request, names: list[str]) -> list[str]:
    """Return which of a hub's files to download: the usual ones, or those that match the recipe's patterns.

    Raises ModelError or DataError when nothing usable is there, DownloadError for an unmatched pattern or unwritable
    name.
    """
    check_names(names, request.source)
    is_model = request.source.product == "model"
    selected = _select_model_files(request, names) if is_model else _select_dataset_files(request, names)
    check_fit(selected, request.source)
    return selected


def _select_model_files(request: Request, names: list[str]) -> list[str]:
    _refuse_pickles_only(names, request.source)
    safe = [name for name in names if not name.endswith(PICKLE_SUFFIXES)]
    safe = [name for name in safe if request.trust_remote_code or not name.endswith(".py")]
    if request.patterns is not None:
        return _matching(safe, request.patterns, request.source)
    return sorted(name for name in safe if name.endswith(".py") or _is_model_file(name, safe))


def _refuse_pickles_only(names: list[str], source: Source) -> None:
    if any(name.endswith(".safetensors") for name in names):
        return
    pickles = sorted(name for name in names if name.endswith(PICKLE_SUFFIXES))
    if pickles:
        shown = shortened(", ".join(pickles[:3]), MAX_SHOWN_CHARACTERS)
        raise ModelError(
            f"{source} has pickled weights only ({shown}), and loading those can run any code; "
            "take a revision or a repository with safetensors"
        )
    raise ModelError(f"{source} has no weights: none of its {len(names)} files ends in .safetensors")


def _is_model_file(name: str, names: list[str]) -> bool:
    """Return whether a top-level file is a model's weights, config, tokenizer or document (not in `onnx/`, …)."""
    if PurePosixPath(name).parent != PurePosixPath("."):
        return False
    if name.endswith(".safetensors"):
        has_standard_names = any(fnmatch(other, "model*.safetensors") for other in names)
        return fnmatch(name, "model*.safetensors") or not has_standard_names
    return name.endswith(_MODEL_SUFFIXES) or name in _DOCUMENTS


def _select_dataset_files(request: Request, names: list[str]) -> list[str]:
    """Return the names of a dataset's data files, media if asked for, card and licence, to be downloaded."""
    data = [
        name
        for name in names
        if name.endswith(_DATA_SUFFIXES) and PurePosixPath(name).name not in _DATASET_DESCRIPTIONS
    ]
    if not data:
        found = shortened(", ".join(sorted(names)[:5]), MAX_SHOWN_CHARACTERS) or "no files"
        raise DataError(
            f"{request.source} has no data files, only {found}; expected {', '.join(_TEXT_DATA)} (also with .gz or "
            ".zst) or .parquet. Loading scripts are never run and archives are not unpacked: convert or unpack the data"
        )
    if request.patterns is not None:
        data = _matching(data, request.patterns, request.source)
    media = [name for name in names if request.with_media and name.lower().endswith(_MEDIA_SUFFIXES)]
    return sorted(data + media + [name for name in names if name in _DOCUMENTS])


def _matching(names: list[str], patterns: tuple[str, ...], source: Source) -> list[str]:
    for pattern in patterns:
        if not any(fnmatch(name, pattern) for name in names):
            there = shortened(", ".join(sorted(names)[:10]), MAX_SHOWN_CHARACTERS)
            raise DownloadError(f"{source} has no file to take that matches {pattern!r}; there are: {there}")
    return sorted(name for name in names if any(fnmatch(name, pattern) for pattern in patterns))
