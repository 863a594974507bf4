"""Table of families: recorded outcomes of the zoo's proofs (`proofs.py`), by family and column."""

from __future__ import annotations

import json
from pathlib import Path

RECORD = Path(__file__).with_name("families.json")
YES = "yes"
WORKS = (YES, "packed", "rows")
"""Outcomes of a cell that is no refusal."""


def recorded() -> dict[str, dict[str, str]]:
    """Return the recorded outcomes of each family, by column."""
    outcomes: dict[str, dict[str, str]] = json.loads(RECORD.read_text()) if RECORD.is_file() else {}
    return outcomes


def table() -> str:
    """Return the recorded outcomes as a Markdown table: a row for families with equal ones."""
    columns = list(dict.fromkeys(column for outcomes in recorded().values() for column in outcomes))
    grouped: dict[tuple[str, ...], list[str]] = {}
    for family, outcomes in recorded().items():
        grouped.setdefault(tuple(outcomes.get(column, "–") for column in columns), []).append(f"`{family}`")
    rows = [f"| families | {' | '.join(columns)} |", f"| --- | {' | '.join('---' for _ in columns)} |"]
    rows += [f"| {', '.join(families)} | {' | '.join(outcomes)} |" for outcomes, families in grouped.items()]
    return "\n".join(rows)
