"""Gates of a promotion, and its outcome, which the promote stage writes to `verdict.json` and `verdict.md`."""

import difflib
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from pydantic import Field

from stages.core.approval import AWAITED, PROMOTED, REFUSED, read_approval
from stages.core.contract import StrictModel
from stages.core.errors import EvaluationError
from stages.kinds.promote.config import GatesConfig
from stages.kinds.promote.paired import Difference

CHAMPION_FILE = "champion.json"
VERDICT_FILE = "verdict.json"
TABLE_FILE = "verdict.md"
Table = tuple[tuple[str, ...], ...]
"""Table in a promotion's report: the heading's cells, then the cells of each row."""
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
Outcome = Literal["promoted", "not promoted", "already champion", "waiting for approval"]
"""Decision about a candidate. The stage itself never writes the last one: see `read_verdict`."""


@dataclass(frozen=True)
class Measurements:
    """Measurements of a candidate that a promotion's gates check; a field is None if it was not measured."""

    scores: Mapping[str, float]
    differences: Sequence[Difference]
    size_mib: float
    win_rates: Mapping[str, float] = field(default_factory=dict)
    kl_nats_per_token: float | None = None
    max_abs_logprob_difference: float | None = None
    output_tokens_per_s: float | None = None
    differing_picture_prompts: float | None = None


@dataclass(frozen=True)
class Gate:
    """Gate of a promotion: a measured value of the candidate (`found`) with its lower or upper limit."""

    name: str
    found: float
    bound: float
    least: bool

    @property
    def missed_by(self) -> float:
        """Distance by which a measurement misses its gate's limit; 0 if the gate holds; NaN for a NaN."""
        gap = self.bound - self.found if self.least else self.found - self.bound
        return 0.0 if gap <= 0 else gap

    @property
    def holds(self) -> bool:
        """Return whether the measurement keeps the gate's limit."""
        return self.missed_by == 0


def judge(gates: GatesConfig, measured: Measurements) -> list[Gate]:
    """Return every gate that the recipe sets with its measured value; raise EvaluationError for a missing one."""
    return [
        *_score_gates(gates, measured.scores),
        *_regression_gates(gates, measured),
        *_win_rate_gates(gates, measured),
        *_cost_gates(gates, measured),
    ]


def _score_gates(gates: GatesConfig, scores: Mapping[str, float]) -> Iterator[Gate]:
    for bounds, least in ((gates.min_scores, True), (gates.max_scores, False)):
        for name, bound in bounds.items():
            yield Gate(name, _score(name, scores), bound, least)


def _score(name: str, scores: Mapping[str, float]) -> float:
    if name not in scores:
        close = difflib.get_close_matches(name, scores, n=1, cutoff=0.5) or sorted(scores)
        choice = f"did you mean {close[0]}?" if len(close) == 1 else f"there are: {', '.join(close) or 'no scores'}"
        raise EvaluationError(f"a gate asks for the score {name}, but the evaluations gave none; {choice}")
    return scores[name]


def _regression_gates(gates: GatesConfig, measured: Measurements) -> Iterator[Gate]:
    bound = gates.max_regression_standard_errors
    if bound is not None:
        for score in measured.differences:
            yield Gate(f"regression of {score.name} (standard errors)", score.regression_standard_errors, bound, False)


def _win_rate_gates(gates: GatesConfig, measured: Measurements) -> Iterator[Gate]:
    if gates.min_win_rate is not None:
        for name, found in measured.win_rates.items():
            yield Gate(name, found, gates.min_win_rate, least=True)


def _cost_gates(gates: GatesConfig, measured: Measurements) -> Iterator[Gate]:
    # No recipe asks for it: a model that gets other prompts than in training is another one than was evaluated.
    if measured.differing_picture_prompts is not None:
        yield Gate("differing_picture_prompts", measured.differing_picture_prompts, 0.0, least=False)
    for name, value, bound, least in (
        ("kl_nats_per_token", measured.kl_nats_per_token, gates.max_kl_nats_per_token, False),
        (
            "max_abs_logprob_difference",
            measured.max_abs_logprob_difference,
            gates.max_abs_logprob_difference,
            False,
        ),
        ("size_mib", measured.size_mib, gates.max_size_mib, False),
        ("output_tokens_per_s", measured.output_tokens_per_s, gates.min_output_tokens_per_s, True),
    ):
        if bound is None:
            continue
        if value is None:
            raise EvaluationError(f"a gate bounds {name}, but nothing measured it; measure it, or drop the gate")
        yield Gate(name, value, bound, least)


class Champion(StrictModel):
    """Registered model version that has the champion's alias in MLflow. evaluations: folders of artifacts."""

    version: str = Field(description="Version number of the champion in MLflow's registry.")
    same_model: bool = Field(
        description="True if the candidate is the same model as this champion, by the digest of its content."
    )
    evaluations: tuple[Path, ...]


class ComparedChampion(StrictModel):
    """Content of `champion.json`: the champion, if there is one, with which the candidate is compared."""

    champion: Champion | None


class Verdict(StrictModel):
    """Content of `verdict.json`: whether the candidate becomes champion, with all gates and score differences.

    against: compared model. warnings: of what no gate checks. gates, differences: None in older artifacts. approval:
    what a person has decided since, or whom it waits for; not in the file.
    """

    outcome: Outcome
    name: str
    champion_version: str | None
    against: str | None
    missed: tuple[str, ...]
    warnings: tuple[str, ...] = ()
    gates: tuple[Gate, ...] | None = None
    differences: tuple[Difference, ...] | None = None
    approval: str | None = Field(None, exclude=True)


def read_verdict(artifact: Path) -> Verdict:
    """Return the verdict of a promotion's artifact, as a person's decision has changed it since the stage wrote it.

    Raises OSError or ValueError for files that cannot be read.
    """
    verdict = Verdict.model_validate_json((artifact / VERDICT_FILE).read_bytes())
    approval = read_approval(artifact)
    if approval is None:
        return verdict
    outcome = PROMOTED if approval.decision == "approved" else AWAITED if approval.is_awaited else REFUSED
    missed = (approval.text,) if outcome == REFUSED else ()
    return verdict.model_copy(
        update={"outcome": outcome, "missed": (*verdict.missed, *missed), "approval": approval.text}
    )


def gate_sentence(gate: Gate) -> str:
    """Return a phrase about a missed gate, such as `size_mib 2.1 > 2, missed by 0.1`."""
    return f"{gate.name} {gate.found:.4g} {'<' if gate.least else '>'} {gate.bound:.4g}, missed by {gate.missed_by:.4g}"


def tables(verdict: Verdict) -> Iterator[Table]:
    """Yield the tables of a promotion's report, gates and score differences, without empty ones."""
    if verdict.gates:
        yield GATE_HEADING, *map(_gate_cells, verdict.gates)
    if verdict.differences:
        yield DIFFERENCE_HEADING, *map(_difference_cells, verdict.differences)


def markdown(verdict: Verdict) -> str:
    """Return a promotion's decision, warnings and tables as Markdown."""
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


def _difference_cells(score: Difference) -> tuple[str, ...]:
    low, high = score.shown_interval
    counts = (str(score.num_samples), str(score.num_unpaired))
    values = (f"{score.candidate:.4f}", f"{score.reference:.4f}", f"{score.difference:+.4f}")
    return (score.name, *counts, *values, f"{score.standard_error:.4f}", f"{low:+.4f} to {high:+.4f}")


def comparison_metrics(differences: Sequence[Difference]) -> dict[str, float]:
    """Return the score differences and their standard errors as MLflow metrics, by metric name."""
    metrics: dict[str, float] = {}
    for score in differences:
        metrics[f"{score.name}_difference"] = score.difference
        metrics[f"{score.name}_difference_stderr"] = score.standard_error
    return {name: value for name, value in metrics.items() if math.isfinite(value)}
