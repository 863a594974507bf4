"""The download stage: source → a verified model folder (`model/`) or the files of a dataset (`data/`).

A hub's files gather in `scratch/`, which survives an interruption, and are moved when all of them are verified.
"""

from __future__ import annotations

import importlib
import json
import shutil
import time
from dataclasses import replace
from pathlib import Path

from stages.core.contract import StageContext, StageResult
from stages.core.errors import DownloadError, ResourceError
from stages.download.builtin.catalog import BUILTINS
from stages.download.config import DownloadConfig
from stages.download.fetch import Fetcher, Snapshot
from stages.download.local import copy_files, hash_files, list_files
from stages.download.progress import Progress
from stages.download.selection import check_names, select_files
from stages.download.source import BuiltinSource, FileSource, HubSource
from stages.models.model_folder import check_model_folder

GIB = 1 << 30


def run(config: DownloadConfig, context: StageContext) -> StageResult:
    """Fetch what the recipe names, check it, and say how much it was.

    Raises ModelError, DataError, DownloadError, ResourceError or TransientError.
    """
    started_s = time.monotonic()
    outside = context.outside or config.resolve_outside()
    revision = str(outside["revision"])
    folder = context.work / ("model" if config.product == "model" else "data")
    shutil.rmtree(folder, ignore_errors=True)
    match config.source:
        case BuiltinSource(name):
            folder.mkdir()
            importlib.import_module(BUILTINS[name].module).make(folder)
        case FileSource(path):
            _copy(config, context, path, revision, folder)
        case HubSource() as source:
            _fetch(config, context, _list_snapshot(source, revision), folder)
    if config.product == "model":
        check_model_folder(folder)
        _warn_of_missing_code(config, context, folder)
    files = [path for path in folder.rglob("*") if path.is_file()]
    metrics = {"bytes": _size_bytes(folder), "num_files": len(files), "seconds": time.monotonic() - started_s}
    return StageResult(metrics=metrics, tags={"source": config.source_text, "revision": revision})


def _copy(config: DownloadConfig, context: StageContext, path: Path, revision: str, folder: Path) -> None:
    files = list_files(path)
    selected = select_files(config, list(files))
    size_bytes = sum(files[name].stat().st_size for name in selected)
    _check_disk(context.work, size_bytes)
    copy_files(((name, files[name]) for name in selected), folder, Progress(context, size_bytes).add)
    if hash_files({name: folder / name for name in selected}) != revision:
        raise DownloadError(f"file://{path} changed after this refresh was planned; run it again")


def _list_snapshot(source: HubSource, revision: str) -> Snapshot:
    """The files of the revision that the version was computed from. The hubs' libraries are imported only if needed."""
    if source.hub == "hf":
        from stages.download import hub

        return hub.list_snapshot(source, revision)
    from stages.download import modelscope

    snapshot = modelscope.list_snapshot(source)
    if snapshot.revision != revision:
        raise DownloadError(f"{source} changed after this refresh was planned; run it again")
    return snapshot


def _fetch(config: DownloadConfig, context: StageContext, snapshot: Snapshot, folder: Path) -> None:
    check_names([file.name for file in snapshot.files], snapshot.source)
    selected = set(select_files(config, [file.name for file in snapshot.files]))
    snapshot = replace(snapshot, files=tuple(file for file in snapshot.files if file.name in selected))
    # By revision: files of a branch that moved on between two attempts must not mix.
    arrivals = context.scratch / snapshot.revision
    arrivals.mkdir(exist_ok=True)
    _check_disk(context.work, snapshot.size_bytes - _size_bytes(arrivals))
    context.milestone(f"downloading {len(snapshot.files)} files, {snapshot.size_bytes / GIB:.3f} GiB")
    Fetcher(snapshot, arrivals, Progress(context, snapshot.size_bytes).add).fetch()
    arrivals.replace(folder)


def _check_disk(folder: Path, needed_bytes: int) -> None:
    free_bytes = shutil.disk_usage(folder).free
    if needed_bytes > free_bytes:
        raise ResourceError(
            f"the download needs {needed_bytes / GIB:.2f} GiB, but only {free_bytes / GIB:.2f} GiB are free where "
            f"{folder} lies; free some space, or set LIFECYCLE_HOME to a larger disk"
        )


def _size_bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def _warn_of_missing_code(config: DownloadConfig, context: StageContext, folder: Path) -> None:
    """A model that brings its own code was downloaded without it."""
    model_config = json.loads((folder / "config.json").read_text())
    if "auto_map" in model_config and not config.trust_remote_code:
        context.warn(
            f"{config.source_text} brings Python files of its own, which were left out; Transformers may know "
            "the architecture without them. If you trust them, set trust_remote_code: true"
        )
