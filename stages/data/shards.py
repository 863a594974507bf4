"""Shards of a split that are not there: of `train-00001-of-00003.parquet` alone, two thirds would be missing."""

from __future__ import annotations

import re
from collections import defaultdict
from pathlib import Path

SHARD = re.compile(r"(?P<before>.*?)-(?P<number>\d+)-of-(?P<count>\d+)(?P<after>\..*)")


def missing_shards(folder: Path) -> list[str]:
    """A sentence for each set of shards below `folder` that is not whole, whether it counts from 0 or from 1."""
    found: dict[tuple[str, int, str], set[int]] = defaultdict(set)
    for path in sorted(folder.rglob("*")):
        if shard := SHARD.fullmatch(path.relative_to(folder).as_posix()):
            found[shard["before"], int(shard["count"]), shard["after"]].add(int(shard["number"]))
    return [
        f"of {before}-*-of-{count:05}{after}, {len(there)} of {count} shards are there; missing: "
        + _missing(there, count)
        for (before, count, after), there in found.items()
        if len(there) != count
    ]


def _missing(there: set[int], count: int) -> str:
    first = 1 if count in there else 0
    missing = [f"{number:05}" for number in range(first, first + count) if number not in there]
    return ", ".join(missing[:10]) + (", …" if len(missing) > 10 else "")
