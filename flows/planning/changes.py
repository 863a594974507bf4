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
from flows.recipe.version import Difference
from flows.store.content import CONTENT_FOLDERS
from flows.store.record import Artifact, Index
from stages.core.errors import LifecycleError
from stages.core.hashing import sha256_of_files
from stages.hubs.files import requested_files
from stages.kinds.download.config import DownloadConfig

REVISION = "content of revision"
CONTENT = "content of "
CONTENTS_CACHE = "contents"
"""Cache of the store that takes what such files held."""
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
    changes = [*_file_changes(_contents(earlier), _outside(files))] if earlier else []
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


def artifact_changes(old: Artifact, new: Artifact) -> Iterator[str]:
    """Which files of what dependents read are gone, new or others; `train.jsonl 300 → 350 rows`."""
    return _file_changes(_contents(old), _contents(new))


def kept_changes(kept: Path, differing: Difference) -> str | None:
    """What changed in a path outside the store, whose hashes differ; None where it was not noted what it held."""
    before, after = (kept_contents(kept, str(digest)) for digest in (differing.old, differing.new))
    changes = [*content_changes(before, after)] if before and after else []
    return _listed(changes) if changes else None


Hashed = dict[str, tuple[str, Path]]
"""Name of a file → its sha256, and where it lies."""


def _contents(artifact: Artifact) -> Hashed:
    folder = CONTENT_FOLDERS[artifact.record.product]
    files = {name: entry for name, entry in artifact.record.files.items() if name.startswith(folder)}
    return {name.removeprefix(folder): (entry.sha256, artifact.folder / name) for name, entry in files.items()}


def _outside(files: Mapping[str, Path]) -> Hashed:
    hashes = sha256_of_files(files)
    return {name: (hashes[name], path) for name, path in files.items()}


def _file_changes(before: Hashed, after: Hashed) -> Iterator[str]:
    for name in sorted(before.keys() | after.keys()):
        if name not in after:
            yield f"{name} is gone"
        elif name not in before:
            yield f"{name} is new ({amount_of(after[name][1])})"
        elif before[name][0] != after[name][0]:
            yield f"{name} {changed_amount(*(amount_of(side[name][1]) for side in (before, after)))}"
