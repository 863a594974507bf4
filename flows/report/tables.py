"""Tables of a report's measurements. Pure: values as they are, and as a person reads them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from flows.report.model import RefreshReport, Score, StageReport
from stages.kinds.registry import kind_of

UNDER_LOAD = re.compile(r"(?P<metric>\w+)_concurrency_(?P<concurrency>\d+)")
COUNTED = re.compile(
    r"num_\w+|\w+_fraction|.*(dropped|left_out|kept).*|(mean|max|min|longest|shortest)_\w*(length|tokens)"
)

PairedMetric = tuple[str, str, float, float]
"""Stage, metric, and its values in the old and the new refresh."""


@dataclass(frozen=True)
class Table:
    """Table of numbers. rows: a name and its cells, each a value or None."""

    heading: tuple[str, ...]
    rows: tuple[tuple[str, tuple[float | None, ...]], ...]


@dataclass(frozen=True)
class Bar:
    """Score on a scale, in percent of its width: the bar, and the 95% interval around its end."""

    score: Score
    zero: float
    left: float
    width: float
    error_left: float
    error_width: float


def number(value: float | None, name: str = "") -> str:
    """Return a number as a person reads it; the page has the exact value beside it."""
    if value is None:
        return "–"
    if name == "mfu" or name == "MFU":
        return f"{value:.1%}"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def training_table(stages: Sequence[StageReport]) -> Table:
    """Return throughput, MFU, memory and time of trainings, beside their predictions."""
    shown = [one for one in stages if one.metrics.keys() & kind_of(one.kind).REPORTED.measured.keys()]
    headings = {name: text for one in shown for name, text in kind_of(one.kind).REPORTED.measured.items()}
    names = [name for name in headings if any(name in one.metrics for one in shown)]
    rows = tuple((one.name, tuple(one.metrics.get(name) for name in names)) for one in shown)
    return Table(("stage", *(headings[name] for name in names)), rows)


def serving_table(stages: Sequence[StageReport]) -> Table:
    """Return a row for each stage and number of concurrent requests."""
    rows = []
    headings = {name: text for one in stages for name, text in kind_of(one.kind).REPORTED.under_load.items()}
    for stage in stages:
        loads: dict[int, dict[str, float]] = {}
        for name, value in stage.metrics.items():
            if match := UNDER_LOAD.fullmatch(name):
                loads.setdefault(int(match["concurrency"]), {})[match["metric"]] = value
        rows += [
            (f"{stage.name}, {load} at a time", tuple(metrics.get(name) for name in headings))
            for load, metrics in sorted(loads.items())
        ]
    return Table(("stage", *headings.values()), tuple(rows))


def data_rows(stages: Sequence[StageReport]) -> Iterator[tuple[str, str, float]]:
    """Yield (stage, what is counted, count): rows, documents, tokens, what was left out."""
    for stage in stages:
        reported = kind_of(stage.kind).REPORTED
        for name, value in stage.metrics.items() if reported.counts_data else ():
            if COUNTED.fullmatch(name) and name not in reported.not_data:
                yield stage.name, name.removeprefix("num_").replace("_", " "), value


def score_bars(scores: Sequence[Score]) -> dict[str, list[Bar]]:
    """Return TASK.METRIC → a bar for each evaluation of it, on one scale.

    The scale is from 0 (or the lowest) to 1 (or the highest).
    """
    groups: dict[str, list[Score]] = {}
    for one in scores:
        groups.setdefault(one.name, []).append(one)
    return {name: _bars(group) for name, group in groups.items()}


def _bars(group: Sequence[Score]) -> list[Bar]:
    bottoms, tops = zip(*(score.interval or (score.value, score.value) for score in group), strict=True)
    is_share = all(0 <= score.value <= 1 for score in group)
    low = 0.0 if is_share else min(0.0, *bottoms)
    high = 1.0 if is_share else max(0.0, *tops) or 1.0

    def place(value: float) -> float:
        return 100 * (min(max(value, low), high) - low) / (high - low)

    bars = []
    for score, bottom, top in zip(group, bottoms, tops, strict=True):
        ends = sorted((place(0.0), place(score.value)))
        error = place(bottom), place(top)
        bars.append(Bar(score, place(0.0), ends[0], ends[1] - ends[0], error[0], error[1] - error[0]))
    return bars


def paired_metrics(
    stages: Iterable[tuple[str, Sequence[StageReport | None]]],
) -> tuple[list[PairedMetric], list[PairedMetric]]:
    """Return the metrics that both refreshes have of a stage: those that differ, and those that do not."""
    rows = [
        (name, metric, value, new.metrics[metric])
        for name, (old, new) in stages
        if old and new
        for metric, value in old.metrics.items()
        if metric in new.metrics
    ]
    differing = [row for row in rows if row[2] != row[3]]
    return differing, [row for row in rows if row[2] == row[3]]


def final_metrics(report: RefreshReport) -> Iterator[tuple[StageReport, list[tuple[str, float]]]]:
    """Yield each stage that has metrics, with all of them."""
    for stage in report.stages:
        if stage.metrics:
            yield stage, list(stage.metrics.items())
