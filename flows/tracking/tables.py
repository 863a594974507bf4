"""Rows of JSON that a stage leaves, as tables that MLflow's pages show: completions, rows that were left out."""

from __future__ import annotations

import json
import math
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import Any

MOST_ROWS = 1000
"""A browser reads the whole table."""


def table_of(file: Path) -> dict[str, list[Any]]:
    """`columns` and `data` (rows), as MLflow stores a table, of a file of JSON lines; no columns where there is no row.

    At most `MOST_ROWS` rows, evenly apart. The values of an object have columns of their own: `rewards.right`.
    """
    with file.open("rb") as stream:
        stride = math.ceil(sum(1 for _ in stream) / MOST_ROWS) or 1
    rows: list[dict[str, Any]] = []
    with file.open("rb") as stream:
        for line in islice(stream, 0, None, stride):
            with suppress(ValueError):  # torn by a kill
                rows.append(_flat(json.loads(line)))
    columns = list(dict.fromkeys(name for row in rows for name in row))
    return {"columns": columns, "data": [[row.get(name) for name in columns] for row in rows]}


def _flat(row: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in row.items():
        found |= {f"{name}.{key}": one for key, one in value.items()} if isinstance(value, dict) else {name: value}
    return found
