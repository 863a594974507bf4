"""Selection of the files of a repository or folder that are downloaded: pure, names in → names out.

A model: its JSON, tokenizer, licence and safetensors; never pickles, and Python only when the recipe trusts it.
A dataset: JSONL, JSON and CSV, maybe compressed (`.gz`, `.zst`), and Parquet; never loading scripts.
"""

from __future__ import annotations

from fnmatch import fnmatch
from pathlib import PurePosixPath

from stages.core.errors import DataError, DownloadError, ModelError
from stages.core.redaction import shortened
from stages.hubs.hub import Request, Source
from stages.hubs.listing import check_fit, check_names
from stages.models.model_folder import PICKLE_SUFFIXES

MAX_SHOWN_CHARACTERS = 500
_TEXT_DATA = (".jsonl", ".ndjson", ".json", ".csv")
_DATA_SUFFIXES = (".parquet", *(f"{suffix}{packed}" for suffix in _TEXT_DATA for packed in ("", ".gz", ".zst")))
_MODEL_SUFFIXES = (".json", ".jinja", ".txt", ".model", ".tiktoken", ".md")
_DOCUMENTS = ("README.md", "LICENSE", "LICENSE.txt", "LICENSE.md", "NOTICE")
_DATASET_DESCRIPTIONS = ("dataset_infos.json", "dataset_info.json", "dataset_dict.json", "state.json")


def select_files(request: Request, names: list[str]) -> list[str]:
    """Return the requested files among the listed ones, sorted.

    Raises ModelError or DataError when nothing usable is there, DownloadError when a pattern matches nothing or when
    the hub lists what cannot be written below a folder.
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
    """Return whether a file belongs to a model. Only the top folder counts: others hold the weights in other formats.

    Such folders are `onnx/` and `original/`.
    """
    if PurePosixPath(name).parent != PurePosixPath("."):
        return False
    if name.endswith(".safetensors"):
        has_standard_names = any(fnmatch(other, "model*.safetensors") for other in names)
        return fnmatch(name, "model*.safetensors") or not has_standard_names
    return name.endswith(_MODEL_SUFFIXES) or name in _DOCUMENTS


def _select_dataset_files(request: Request, names: list[str]) -> list[str]:
    """Return the data files with their card and licence."""
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
    return sorted(data + [name for name in names if name in _DOCUMENTS])


def _matching(names: list[str], patterns: tuple[str, ...], source: Source) -> list[str]:
    for pattern in patterns:
        if not any(fnmatch(name, pattern) for name in names):
            there = shortened(", ".join(sorted(names)[:10]), MAX_SHOWN_CHARACTERS)
            raise DownloadError(f"{source} has no file to take that matches {pattern!r}; there are: {there}")
    return sorted(name for name in names if any(fnmatch(name, pattern) for pattern in patterns))
