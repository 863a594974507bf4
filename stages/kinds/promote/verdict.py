"""What a promotion is given and what it says: `champion.json` in, `verdict.json` and `verdict.md` out."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Literal

from pydantic import Field

from stages.core.contract import StrictModel
from stages.kinds.promote.gates import Gate
from stages.kinds.promote.paired import Difference

CHAMPION_FILE = "champion.json"
VERDICT_FILE = "verdict.json"
TABLE_FILE = "verdict.md"

Table = tuple[tuple[str, ...], ...]
"""Heading and rows."""
GATE_HEADING = ("gate", "found", "bound", "holds", "missed by")
DIFFERENCE_HEADING = (
    "score",
    "samples",
    "unpaired",
    "candidate",
    "other",
    "difference",
    "standard error",
    "95% interval",
)

Outcome = Literal["promoted", "not promoted", "already champion"]


class Champion(StrictModel):
    """The model that the alias points to now. `evaluations` are folders of artifacts."""

    version: str = Field(description="Of the registered model.")
    same_model: bool = Field(description="Whether the candidate has the very same content.")
    evaluations: tuple[Path, ...]


class Standing(StrictModel):
    """`champion.json`: who is champion while the candidate is judged."""

    champion: Champion | None


class Verdict(StrictModel):
    """`verdict.json`. `against`: what the candidate was compared with. `warnings`: of what no gate looks at.

    gates, differences: None in artifacts of before they were kept as data; `verdict.md` has them there.
    """

    outcome: Outcome
    name: str
    champion_version: str | None
    against: str | None
    missed: tuple[str, ...]
    warnings: tuple[str, ...] = ()
    gates: tuple[Gate, ...] | None = None
    differences: tuple[Difference, ...] | None = None


def gate_sentence(gate: Gate) -> str:
    """`size_mib 2.1 > 2 by 0.1`."""
    return f"{gate.name} {gate.found:.4g} {'<' if gate.least else '>'} {gate.bound:.4g}, missed by {gate.missed_by:.4g}"


def tables(verdict: Verdict) -> Iterator[Table]:
    """The gates, and the comparison; neither where there is none."""
    if verdict.gates:
        yield GATE_HEADING, *map(_gate_cells, verdict.gates)
    if verdict.differences:
        yield DIFFERENCE_HEADING, *map(_difference_cells, verdict.differences)


def markdown(verdict: Verdict) -> str:
    """Outcome, warnings and tables."""
    blocks = [f"# {verdict.name}: {verdict.outcome}", *(f"**Warning:** {warning}" for warning in verdict.warnings)]
    for table in tables(verdict):
        if table[0] == DIFFERENCE_HEADING:
            blocks.append(f"Compared with {verdict.against} on the same samples, candidate − {verdict.against}:")
        heading, *rows = (f"| {' | '.join(cells)} |".replace("| no |", "| **no** |") for cells in table)
        blocks.append("\n".join([heading, f"| --- |{' ---: |' * (len(table[0]) - 1)}", *rows]))
    if not verdict.differences:
        blocks.append("There is nothing to compare it with.")
    return "\n\n".join(blocks)


def _gate_cells(gate: Gate) -> tuple[str, ...]:
    bound = f"{'≥' if gate.least else '≤'} {gate.bound:.4g}"
    verdict = ("yes", "") if gate.holds else ("no", f"{gate.missed_by:.4g}")
    return (gate.name, f"{gate.found:.4g}", bound, *verdict)


def _difference_cells(one: Difference) -> tuple[str, ...]:
    low, high = one.shown_interval
    counts = (str(one.num_samples), str(one.num_unpaired))
    scores = (f"{one.candidate:.4f}", f"{one.reference:.4f}", f"{one.difference:+.4f}", f"{one.standard_error:.4f}")
    return (one.name, *counts, *scores, f"{low:+.4f} to {high:+.4f}")


def comparison_metrics(differences: Sequence[Difference]) -> dict[str, float]:
    """By the names they have in MLflow."""
    metrics: dict[str, float] = {}
    for one in differences:
        metrics |= {f"{one.name}_difference": one.difference, f"{one.name}_difference_stderr": one.standard_error}
    return {name: value for name, value in metrics.items() if math.isfinite(value)}
