"""What a promotion is given and what it says: `champion.json` in, `verdict.json` and `verdict.md` out."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Literal

from pydantic import Field

from stages.core.contract import StrictModel
from stages.promote.gates import Gate
from stages.promote.paired import Difference

CHAMPION_FILE = "champion.json"
VERDICT_FILE = "verdict.json"
TABLE_FILE = "verdict.md"

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
    """`verdict.json`. `against`: what the candidate was compared with. `warnings`: of what no gate looks at."""

    outcome: Outcome
    name: str
    champion_version: str | None
    against: str | None
    missed: tuple[str, ...]
    warnings: tuple[str, ...] = ()


def gate_sentence(gate: Gate) -> str:
    """`size_mib 2.1 > 2 by 0.1`."""
    return f"{gate.name} {gate.found:.4g} {'<' if gate.least else '>'} {gate.bound:.4g}, missed by {gate.missed_by:.4g}"


def markdown(verdict: Verdict, gates: Sequence[Gate], differences: Sequence[Difference]) -> str:
    """Outcome, gates and comparison as tables."""
    warnings = [line for warning in verdict.warnings for line in (f"**Warning:** {warning}", "")]
    head = [f"# {verdict.name}: {verdict.outcome}", "", *warnings]
    return "\n".join([*head, *_gate_rows(gates), *_rows(verdict, differences)])


def _gate_rows(gates: Sequence[Gate]) -> Iterator[str]:
    if not gates:
        return
    yield from ("| gate | found | bound | holds | missed by |", "| --- | ---: | ---: | --- | ---: |")
    for gate in gates:
        bound = f"{'≥' if gate.least else '≤'} {gate.bound:.4g}"
        missed = "" if gate.holds else f"{gate.missed_by:.4g}"
        yield f"| {gate.name} | {gate.found:.4g} | {bound} | {'yes' if gate.holds else '**no**'} | {missed} |"
    yield ""


def _rows(verdict: Verdict, differences: Sequence[Difference]) -> Iterator[str]:
    if not differences:
        yield "There is nothing to compare it with."
        return
    yield f"Compared with {verdict.against} on the same samples, candidate − {verdict.against}:"
    yield ""
    yield "| score | samples | unpaired | candidate | other | difference | standard error | 95% interval |"
    yield "| --- | ---: | ---: | ---: | ---: | ---: | ---: | --- |"
    for one in differences:
        low, high = one.interval
        yield (
            f"| {one.name} | {one.num_samples} | {one.num_unpaired} | {one.candidate:.4f} | {one.reference:.4f} "
            f"| {one.difference:+.4f} | {one.standard_error:.4f} | {low:+.4f} to {high:+.4f} |"
        )


def comparison_metrics(differences: Sequence[Difference]) -> dict[str, float]:
    """By the names they have in MLflow."""
    metrics: dict[str, float] = {}
    for one in differences:
        metrics |= {f"{one.name}_difference": one.difference, f"{one.name}_difference_stderr": one.standard_error}
    return {name: value for name, value in metrics.items() if math.isfinite(value)}
