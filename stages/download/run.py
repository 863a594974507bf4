"""The download stage: source → a verified model folder (`model/`) or the files of a dataset (`data/`)."""

from __future__ import annotations

import importlib
import shutil
import time
from pathlib import Path

from stages.contract import StageContext, StageResult
from stages.download.builtin.catalog import BUILTINS
from stages.download.config import DownloadConfig
from stages.download.source import BuiltinSource


def run(context: StageContext) -> StageResult:
    """Fetch what the recipe names, check it, and say how much it was."""
    started_s = time.monotonic()
    config: DownloadConfig = context.config
    folder = _empty_folder(context.work / ("model" if config.product == "model" else "data"))
    source = config.source
    if isinstance(source, BuiltinSource):
        importlib.import_module(BUILTINS[source.name].module).make(folder)
    files = [path for path in folder.rglob("*") if path.is_file()]
    return StageResult(
        metrics={
            "bytes": sum(path.stat().st_size for path in files),
            "num_files": len(files),
            "seconds": time.monotonic() - started_s,
        },
        tags={"source": config.model or config.dataset or ""},
    )


def _empty_folder(folder: Path) -> Path:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    return folder
