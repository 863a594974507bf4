"""Download stage: fetches a model (into `model/`), an adapter (`adapter/`) or a dataset (`data/`), and checks it.

A streamed dataset is represented by pointers to its files.
"""

import shutil
import time
from pathlib import Path

from stages.core.contract import StageContext, StageResult
from stages.core.errors import DataError
from stages.data.files import missing_shards
from stages.hubs.delivery import GIB, size_bytes
from stages.hubs.listing import path_in
from stages.hubs.registry import hub_of, streaming_hub_of
from stages.kinds.download.config import DownloadConfig
from stages.models.facts import ModelFacts
from stages.models.model_folder import check_model_folder
from stages.models.recorded import TRAINED_ON_FILE
from stages.remote.pointers import write_pointer

FOLDERS = {"model": "model", "adapter": "adapter", "dataset": "data"}


def run(config: DownloadConfig, context: StageContext) -> StageResult:
    """Fetch the model, adapter or dataset that the recipe names, check it, and report its size.

    Raises ModelError, DataError, DownloadError, ResourceError or TransientError.
    """
    started_s = time.monotonic()
    outside = context.outside or config.resolve_outside()
    revision = str(outside["revision"])
    folder = context.work / FOLDERS[config.product]
    shutil.rmtree(folder, ignore_errors=True)
    metrics: dict[str, float] = {}
    if config.stream:
        metrics["streamed_bytes"] = _point(config, revision, folder, context)
    else:
        hub_of(config.source).deliver(config.request, revision, folder, context)
    if config.product == "model":
        _drop_foreign_note(config, context, folder)
        facts = ModelFacts(folder)
        for unusual in check_model_folder(facts):
            context.warn(f"{config.source}: {unusual}")
        _warn_of_missing_code(config, context, facts)
    elif config.base:
        from stages.models.start_up import hide_unused_packages  # torch takes seconds to import

        hide_unused_packages()
        from stages.kinds.download.adapter import import_adapter

        import_adapter(folder, context.inputs[config.base], context, trust_remote_code=config.trust_remote_code)
    else:
        _check_shards(config, context, folder)
    num_files = sum(path.is_file() for path in folder.rglob("*"))
    metrics |= {"bytes": size_bytes(folder), "num_files": num_files, "seconds": time.monotonic() - started_s}
    return StageResult(metrics=metrics, tags={"source": str(config.source), "revision": revision})


def _point(config: DownloadConfig, revision: str, folder: Path, context: StageContext) -> int:
    """Write small files that name a streamed dataset's source files; returns the source files' total size in bytes."""
    pointers = streaming_hub_of(config.source).pointers(config.request, revision)
    for name, pointer in pointers.items():
        write_pointer(path_in(folder, name, config.source), pointer)
    total_bytes = sum(pointer.size_bytes for pointer in pointers.values())
    context.milestone(f"{len(pointers)} files, {total_bytes / GIB:.3f} GiB, stay at {config.source}")
    return total_bytes


def _drop_foreign_note(config: DownloadConfig, context: StageContext, folder: Path) -> None:
    """Delete the record of its training (chat prompts, date shown) of a model from outside this artifact store."""
    work, source = context.work.resolve(), Path(config.source.name).resolve()
    is_ours = config.source.hub == "file" and work.parents[1].name == ".work" and source.is_relative_to(work.parents[2])
    note = folder / TRAINED_ON_FILE
    if not is_ours and note.exists():
        note.unlink()
        context.milestone(f"{TRAINED_ON_FILE} of {config.source} is left out: only trainings of this store write it")


def _warn_of_missing_code(config: DownloadConfig, context: StageContext, facts: ModelFacts) -> None:
    """Warn if the model's own Python code was not downloaded because `trust_remote_code` is off."""
    if "auto_map" in facts.config and not config.trust_remote_code:
        context.warn(
            f"{config.source} brings Python files of its own, which were left out; Transformers may know "
            "the architecture without them. If you trust them, set trust_remote_code: true"
        )


def _check_shards(config: DownloadConfig, context: StageContext, folder: Path) -> None:
    """Raise DataError if a shard of the dataset is missing; only warn if the recipe selects files itself."""
    missing = "; ".join(missing_shards(folder))
    if missing and (config.files or (config.source.hub == "file" and Path(config.source.name).is_file())):
        context.warn(f"{config.source}: {missing}, since `files` or the source names these")
    elif missing:
        raise DataError(
            f"{config.source} is not whole: {missing}. Put them there, or name the files that are meant (`files`)"
        )
