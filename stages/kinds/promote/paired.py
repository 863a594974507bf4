"""Paired comparison of two models' evaluation scores, on the samples that both answered.

Per score: mean difference, standard error and a 95% interval, Newcombe's where all samples score 0 or 1, else by
Student's t. Pairing takes out what both find easy or hard, so that far smaller differences show (Miller, "Adding Error
Bars to Evals", arXiv 2411.00640, section 4.2).
"""

import json
import math
import statistics
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stages.core.errors import EvaluationError
from stages.core.intervals import QUANTILE_95, Interval, newcombe, student_t
from stages.harnesses.scores import NO_FILTER, read_samples

TOLERANCE = 1e-9
ASKED_ALIKE = ("doc_hash", "target_hash", "prompt_hash")


@dataclass(frozen=True)
class Scores:
    """Score of one evaluation by document. keys: hashes of what was asked. setting: must be equal to compare."""

    name: str
    task: str
    values: Mapping[int, float]
    keys: Mapping[int, tuple[str, ...]]
    setting: Mapping[str, Any]
    higher_is_better: bool


@dataclass(frozen=True)
class Difference:
    """Difference of a score, candidate − reference, over the `num_samples` documents that both models answered.

    interval: 95%; None in older verdicts(normal approximation). largest: 1 for the difference of a win rate, in those.
    """

    name: str
    num_samples: int
    num_unpaired: int
    candidate: float
    reference: float
    difference: float
    standard_error: float
    higher_is_better: bool
    largest: float | None = None
    interval: Interval | None = None

    @property
    def shown_interval(self) -> Interval:
        """Confidence interval (95%) of a score difference, by the method that decided the promotion."""
        if self.interval:
            return self.interval
        if self.largest is None:
            margin = QUANTILE_95 * self.standard_error
            return self.difference - margin, self.difference + margin
        return win_rate_interval(self.difference, self.standard_error, self.num_samples)

    @property
    def solved_by_neither(self) -> bool:
        """Return whether both models scored 0 where higher is better, so that the score cannot show which is better."""
        return self.higher_is_better and self.candidate == self.reference == 0

    @property
    def regression_standard_errors(self) -> float:
        """Regression of the candidate's score, in standard errors of the difference; negative if it is better."""
        worse = -self.difference if self.higher_is_better else self.difference
        if abs(worse) <= TOLERANCE:  # rounding, which a standard error of 0 would make infinite
            return 0.0
        # A standard error of 0: every sample differs by the same.
        return worse / self.standard_error if self.standard_error else math.copysign(math.inf, worse)


def win_rate_interval(difference: float, standard_error: float, num_samples: int) -> Interval:
    """Return the 95% interval of win rate − loss rate by Student's t, limited to [-1, 1]."""
    low, high = student_t(difference, standard_error, num_samples)
    return max(-1.0, low), min(1.0, high)


def paired_difference(candidate: Scores, reference: Scores) -> Difference:
    """Return the mean difference d̄ over shared documents, and its standard error √(Σ(d − d̄)² / (n − 1) / n).

    Raises EvaluationError unless both were asked the same, of at least two documents.
    """
    _check_asked_alike(candidate, reference)
    shared = sorted(candidate.values.keys() & reference.values.keys())
    if len(shared) < 2:
        raise EvaluationError(
            f"comparing {candidate.name}: {len(shared)} samples were answered by both, expected at least 2; "
            "evaluate both on the same samples (`limit`)"
        )
    ours, theirs = ([side.values[document] for document in shared] for side in (candidate, reference))
    differences = [mine - other for mine, other in zip(ours, theirs, strict=True)]
    difference = statistics.fmean(differences)
    standard_error = statistics.stdev(differences) / math.sqrt(len(shared))
    if {*ours, *theirs} <= {0.0, 1.0}:
        # Right: both, ours alone, theirs alone, neither.
        counts = Counter(zip(ours, theirs, strict=True))
        interval = newcombe(counts[1.0, 1.0], counts[1.0, 0.0], counts[0.0, 1.0], counts[0.0, 0.0])
    else:
        interval = student_t(difference, standard_error, len(shared))
    return Difference(
        name=candidate.name,
        num_samples=len(shared),
        num_unpaired=len(candidate.values.keys() ^ reference.values.keys()),
        candidate=statistics.fmean(ours),
        reference=statistics.fmean(theirs),
        difference=difference,
        standard_error=standard_error,
        higher_is_better=candidate.higher_is_better,
        interval=interval,
    )


def compare(candidate: Sequence[Path], reference: Sequence[Path]) -> list[Difference]:
    """Return paired differences of all shared scores; raise EvaluationError for none, or a task that differs."""
    ours, theirs = read_scores(candidate), read_scores(reference)
    shared = [name for name in ours if name in theirs]
    if not shared:
        raise EvaluationError(
            f"comparing {', '.join(ours) or 'no scores'} with {', '.join(theirs) or 'no scores'}: they have none in "
            "common; evaluate both on the same tasks, or name `baselines` that are"
        )
    return [paired_difference(ours[name], theirs[name]) for name in shared]


def read_scores(evaluations: Sequence[Path]) -> dict[str, Scores]:
    """Return the evaluations' scores that are means over samples (not a corpus BLEU), with each sample's value.

    Raises EvaluationError for unreadable files.
    """
    return {scores.name: scores for folder in evaluations for scores in _scores_of(folder)}


def _scores_of(folder: Path) -> Iterator[Scores]:
    try:
        scores = json.loads((folder / "scores.json").read_bytes())
        for task in scores["configs"]:
            yield from _scores_of_task(task, read_samples(folder, task), scores)
    except (OSError, ValueError, KeyError) as error:
        raise EvaluationError(f"reading the samples of {folder.name}: {type(error).__name__}: {error}") from error


def _scores_of_task(task: str, rows: list[dict[str, Any]], scores: dict[str, Any]) -> Iterator[Scores]:
    setting = {
        "version": scores["versions"].get(task),
        "examples in the prompt": scores["n-shot"].get(task),
        "generation": scores["configs"][task].get("generation_kwargs"),
    }
    for key, score in scores["results"][task].items():
        metric, comma, filter_name = key.partition(",")
        asked = [row for row in rows if row["filter"] == filter_name and isinstance(row.get(metric), int | float)]
        values = {row["doc_id"]: float(row[metric]) for row in asked}
        # lm-eval's scores are METRIC,FILTER; other keys, such as `alias`, have no comma.
        if comma and values and math.isclose(statistics.fmean(values.values()), score, abs_tol=1e-6):
            yield Scores(
                name=f"{task}.{metric}" if filter_name == NO_FILTER else f"{task}.{filter_name}.{metric}",
                task=task,
                values=values,
                keys={row["doc_id"]: tuple(row[key] for key in ASKED_ALIKE) for row in asked},
                setting=setting,
                higher_is_better=scores["higher_is_better"].get(task, {}).get(metric) is not False,
            )


def _check_asked_alike(candidate: Scores, reference: Scores) -> None:
    remedy = "evaluate the other model as this one, or name an evaluation that was asked the same in `baselines`"
    for what, ours in candidate.setting.items():
        if ours != (theirs := reference.setting[what]):
            raise EvaluationError(
                f"comparing {candidate.name}: the {what} of task {candidate.task} is {ours} here and {theirs} there, "
                f"so that the scores cannot be compared; {remedy}"
            )
    for document in candidate.keys.keys() & reference.keys.keys():
        ours, theirs = candidate.keys[document], reference.keys[document]
        different = [key for key, mine, other in zip(ASKED_ALIKE, ours, theirs, strict=True) if mine != other]
        if different:
            raise EvaluationError(
                f"comparing {candidate.name}: document {document} of task {candidate.task} differs in its "
                f"{different[0].removesuffix('_hash')}; {remedy}"
            )
