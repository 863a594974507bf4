"""What changed in the files of this machine that a download takes, in words: `train.jsonl 300 → 350 rows`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

from flows.planning.plan import Plan, PlannedStage
from flows.store.record import Artifact, Index
from stages.core.errors import LifecycleError
from stages.core.hashing import sha256_of_files
from stages.download.config import DownloadConfig
from stages.hubs.files import requested_files

REVISION = "content of revision"
ROW_FILES = (".jsonl", ".csv")
MAX_COUNTED_BYTES = 1 << 28
"""Of a file whose rows are counted: about a second. Of a larger one, its size says enough."""
MAX_NAMED = 5


def with_changes(planned: Plan, index: Index) -> Plan:
    """The plan with the files that changed in place of two hashes; reads those that it names."""
    return replace(planned, stages={name: _explained(stage, index) for name, stage in planned.stages.items()})


def _explained(stage: PlannedStage, index: Index) -> PlannedStage:
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
    more = [f"and {len(changes) - MAX_NAMED} more files"] if len(changes) > MAX_NAMED else []
    words = f"files of {config.source}: {', '.join([*changes[:MAX_NAMED], *more])}"
    return replace(stage, reason=stage.reason.replace(str(differing), words))


def _changes(earlier: Artifact, product: str, files: Mapping[str, Path]) -> Iterator[str]:
    """files: those of today, by name."""
    folder = "model/" if product == "model" else "data/"
    before = {name.removeprefix(folder): one for name, one in earlier.record.files.items() if name.startswith(folder)}
    hashes = sha256_of_files(files)
    for name in sorted(before.keys() | files.keys()):
        if name not in files:
            yield f"{name} is gone"
        elif name not in before:
            yield f"{name} is new ({_amount(files[name])})"
        elif before[name].sha256 != hashes[name]:
            old, new = _amount(earlier.folder / folder / name), _amount(files[name])
            number, _, unit = old.partition(" ")
            yield f"{name} {number} → {new}" if old != new and new.endswith(unit) else f"{name} other {unit}, {new}"


def _amount(file: Path) -> str:
    """`350 rows`, or `1,234 bytes`."""
    if file.suffix not in ROW_FILES or file.stat().st_size > MAX_COUNTED_BYTES:
        return f"{file.stat().st_size:,} bytes"
    num_rows = 0
    with file.open("rb") as stream:
        num_rows = sum(bool(line.strip()) for line in stream)
    return f"{num_rows - (file.suffix == '.csv'):,} rows"
