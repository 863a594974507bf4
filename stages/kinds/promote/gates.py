"""Gates: what was measured, bounds of the recipe → which hold, and by how much the others are missed. Pure."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from stages.core.errors import EvaluationError
from stages.kinds.promote.config import GatesConfig
from stages.kinds.promote.paired import Difference


@dataclass(frozen=True)
class Measurements:
    """What the gates ask of a candidate; None for what was not measured."""

    scores: Mapping[str, float]
    differences: Sequence[Difference]
    size_mib: float
    win_rates: Mapping[str, float] = field(default_factory=dict)
    kl_nats_per_token: float | None = None
    max_abs_logprob_difference: float | None = None
    output_tokens_per_s: float | None = None


@dataclass(frozen=True)
class Gate:
    """A bound: `found` must not be below it (`least`), or not above it."""

    name: str
    found: float
    bound: float
    least: bool

    @property
    def missed_by(self) -> float:
        """0 when it holds; NaN holds nowhere."""
        gap = self.bound - self.found if self.least else self.found - self.bound
        return 0.0 if gap <= 0 else gap

    @property
    def holds(self) -> bool:
        """Whether the candidate passes."""
        return self.missed_by == 0


def judge(gates: GatesConfig, measured: Measurements) -> list[Gate]:
    """All gates that the recipe sets. Raises EvaluationError for a value that a gate needs and nothing measured."""
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
        for one in measured.differences:
            yield Gate(f"regression of {one.name} (standard errors)", one.regression_standard_errors, bound, False)


def _win_rate_gates(gates: GatesConfig, measured: Measurements) -> Iterator[Gate]:
    if gates.min_win_rate is not None:
        for name, found in measured.win_rates.items():
            yield Gate(name, found, gates.min_win_rate, least=True)


def _cost_gates(gates: GatesConfig, measured: Measurements) -> Iterator[Gate]:
    for name, found, bound, least in (
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
        if found is None:
            raise EvaluationError(f"a gate bounds {name}, but nothing measured it; measure it, or drop the gate")
        yield Gate(name, found, bound, least)
