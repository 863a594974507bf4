"""What changed in the files of this machine that a recipe names, in words: `train.jsonl 300 → 350 rows`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

from flows.planning.contents import (
    amount_of,
    changed_amount,
    content_changes,
    contents_of,
    keep_contents,
    kept_contents,
)
from flows.planning.plan import Plan, PlannedStage
from flows.store.content import CONTENT_FOLDERS
from flows.store.record import Artifact, Index
from stages.core.errors import LifecycleError
from stages.core.fields import Product
from stages.core.hashing import sha256_of_files
from stages.download.config import DownloadConfig
from stages.hubs.files import requested_files

REVISION = "content of revision"
CONTENT = "content of "
MAX_NAMED = 5


def with_changes(planned: Plan, index: Index, kept: Path) -> Plan:
    """The plan with the files that changed in place of two hashes; reads those that it names.

    kept: folder of what such files held when they were planned before; what they hold now is noted there.
    """
    stages = {
        name: _with_paths(_with_sources(_with_files(stage, index), index), kept)
        for name, stage in planned.stages.items()
    }
    return replace(planned, stages=stages)


def _with_paths(stage: PlannedStage, kept: Path) -> PlannedStage:
    """Of paths outside the store, such as `task_folder`."""
    reason = stage.reason
    outside = stage.identity["outside"]
    assert isinstance(outside, dict)
    for field, path in stage.config.outside_paths().items():
        if field not in outside:
            continue
        keep_contents(kept, str(outside[field]), path)
        differing = next((one for one in stage.differences if one.field == CONTENT + field), None)
        before = kept_contents(kept, str(differing.old)) if differing else None
        if before:
            changes = [*content_changes(before, contents_of(path))]
            reason = reason.replace(str(differing), f"{field}: {_listed(changes)}") if changes else reason
    return replace(stage, reason=reason)


def _with_files(stage: PlannedStage, index: Index) -> PlannedStage:
    """Of a download."""
    config = stage.config
    differing = next((one for one in stage.differences if one.field == REVISION), None)
    if differing is None or not isinstance(config, DownloadConfig) or config.source.hub != "file":
        return stage
    earlier = index.nearest(stage.kind, stage.name, stage.identity)
    try:
        files = requested_files(config.request)
    except LifecycleError:
        return stage
    changes = [*_changes(earlier, config.product, files)] if earlier else []
    if not changes:
        return stage
    words = f"files of {config.source}: {_listed(changes)}"
    return replace(stage, reason=stage.reason.replace(str(differing), words))


def _with_sources(stage: PlannedStage, index: Index) -> PlannedStage:
    """Of a download from elsewhere than before: whole sources, of which a path is no identity."""
    config = stage.config
    product = config.product if isinstance(config, DownloadConfig) else None
    differing = next((one for one in stage.differences if one.field == product), None)
    earlier = index.nearest(stage.kind, stage.name, stage.identity) if differing else None
    if differing is None or earlier is None or not isinstance(config, DownloadConfig):
        return stage
    words = f"{product} {earlier.record.tags.get('source', differing.old)} → {config.source}"
    return replace(stage, reason=stage.reason.replace(str(differing), words))


def _listed(changes: list[str]) -> str:
    more = [f"and {len(changes) - MAX_NAMED} more files"] if len(changes) > MAX_NAMED else []
    return ", ".join([*changes[:MAX_NAMED], *more])


def _changes(earlier: Artifact, product: Product, files: Mapping[str, Path]) -> Iterator[str]:
    """files: those of today, by name."""
    folder = CONTENT_FOLDERS[product]
    before = {name.removeprefix(folder): one for name, one in earlier.record.files.items() if name.startswith(folder)}
    hashes = sha256_of_files(files)
    for name in sorted(before.keys() | files.keys()):
        if name not in files:
            yield f"{name} is gone"
        elif name not in before:
            yield f"{name} is new ({amount_of(files[name])})"
        elif before[name].sha256 != hashes[name]:
            old, new = amount_of(earlier.folder / folder / name), amount_of(files[name])
            yield f"{name} {changed_amount(old, new)}"
