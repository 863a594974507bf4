"""Tables and bar charts of a report's measurements, with exact values and as rounded for reading. Pure: does no I/O."""

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from flows.report.layouts import Row
from flows.report.model import RefreshReport, Score, StageReport
from stages.kinds.registry import kind_of

UNDER_LOAD = re.compile(r"(?P<metric>\w+)_concurrency_(?P<concurrency>\d+)")
COUNTED = re.compile(
    r"num_\w+|\w+_fraction|.*(dropped|left_out|kept).*|(mean|max|min|longest|shortest)_\w*(length|tokens)"
)

PairedMetric = tuple[str, str, float, float]
"""Metric that two refreshes share: stage, metric name, value in the old and in the new refresh."""


@dataclass(frozen=True)
class Table:
    """Table of numbers in a report. rows: a name and its cells, where None is a missing value."""

    heading: tuple[str, ...]
    rows: tuple[tuple[str, tuple[float | None, ...]], ...]


@dataclass(frozen=True)
class Bar:
    """Bar of a bar chart: its value, and marks drawn over it, such as an error bar.

    text, exact: the value as a person reads it, and exactly, followed by those of single processes (`dots`). whisker:
    95% interval of a score; half the spread of the step time on either side of a layout's value. line: the prediction;
    in scaling, the value of perfect scaling.
    """

    name: str
    value: float
    text: str
    exact: str
    whisker: tuple[float, float] | None = None
    line: float | None = None
    dots: tuple[float, ...] = ()

    @property
    def end(self) -> float:
        """Return the largest value drawn for the bar: its own, or that of a mark over it, such as an error bar."""
        return max(self.value, *(self.whisker or ()), self.line or 0.0, *self.dots)


@dataclass(frozen=True)
class Bars:
    """Bars of a bar chart that share one scale, from `low` to `high`."""

    bars: tuple[Bar, ...]
    low: float
    high: float

    def place(self, value: float) -> float:
        """Return where a value lies on the bar chart's scale, in percent; at the nearer end if beyond it."""
        return 100 * (min(max(value, self.low), self.high) - self.low) / (self.high - self.low)


def number(value: float | None, name: str = "") -> str:
    """Return a number rounded for reading; the HTML page gives the exact value beside it."""
    if value is None:
        return "–"
    if name == "mfu" or name == "MFU":
        return f"{value:.1%}"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def training_table(stages: Sequence[StageReport]) -> Table:
    """Return a table of each training's throughput, MFU, memory and time, next to their predictions."""
    shown = [one for one in stages if one.metrics.keys() & kind_of(one.kind).REPORTED.measured.keys()]
    headings = {name: text for one in shown for name, text in kind_of(one.kind).REPORTED.measured.items()}
    names = [name for name in headings if any(name in one.metrics for one in shown)]
    rows = tuple((one.name, tuple(one.metrics.get(name) for name in names)) for one in shown)
    return Table(("stage", *(headings[name] for name in names)), rows)


def serving_table(stages: Sequence[StageReport]) -> Table:
    """Return a table of serving metrics, with a row for each stage and number of concurrent requests."""
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
    """Yield (stage, counted thing, number) for rows, documents and tokens that stages read, produced or left out."""
    for stage in stages:
        reported = kind_of(stage.kind).REPORTED
        for name, value in stage.metrics.items() if reported.counts_data else ():
            if COUNTED.fullmatch(name) and name not in reported.not_data:
                yield stage.name, name.removeprefix("num_").replace("_", " "), value


def score_bars(scores: Sequence[Score]) -> dict[str, Bars]:
    """Return a bar chart per TASK.METRIC, scaled from 0 (or the lowest) to 1 (or the highest)."""
    groups: dict[str, list[Score]] = {}
    for one in scores:
        groups.setdefault(one.name, []).append(one)
    return {name: _score_bars(group) for name, group in groups.items()}


def _score_bars(group: Sequence[Score]) -> Bars:
    bottoms, tops = zip(*(score.interval or (score.value, score.value) for score in group), strict=True)
    is_share = all(0 <= score.value <= 1 for score in group)
    bars = []
    for score in group:
        text, exact = number(score.value), str(score.value)
        if score.standard_error is not None:
            text, exact = f"{text} ± {number(score.standard_error)}", f"{exact} ± {score.standard_error}"
        bars.append(Bar(score.stage, score.value, text, exact, score.interval))
    return Bars(
        tuple(bars), low=0.0 if is_share else min(0.0, *bottoms), high=1.0 if is_share else max(0.0, *tops) or 1.0
    )


def layout_bars(rows: Sequence[Row]) -> dict[str, Bars]:
    """Return bar charts of the compared layouts by heading: throughput, step time, memory, strong and weak scaling."""
    groups = {
        "Throughput": _measured(rows, "tokens_per_s", "tokens/s"),
        "Step time": _measured(rows, "step_time_s", "s", "predicted_step_time_s"),
        "Memory of the process that needs most": _measured(rows, "peak_memory_gib", "GiB", "predicted_memory_gib"),
        "Strong scaling": _scaling(rows, lambda row: f"rows a step: {row.global_batch_size}"),
        "Weak scaling": _scaling(rows, lambda row: f"rows a device: {row.global_batch_size / row.num_devices:g}"),
    }
    return {name: Bars(tuple(bars), 0.0, max(bar.end for bar in bars) or 1.0) for name, bars in groups.items() if bars}


def _measured(rows: Sequence[Row], metric: str, unit: str, predicted: str = "") -> list[Bar]:
    """Return a bar per layout that has the metric, with its spread, its prediction and single ranks' values."""
    bars = []
    for name, metrics in ((row.text, row.metrics) for row in rows if metric in row.metrics):
        value, expected, whisker = metrics[metric], metrics.get(predicted), None
        text = f"{number(value)} {unit}" + ("" if expected is None else f", predicted {number(expected)}")
        ranks = tuple(metrics[other] for other in metrics if other.startswith(f"{metric}_rank_"))
        if metric != "peak_memory_gib" and "step_time_iqr_s" in metrics:
            half = value * metrics["step_time_iqr_s"] / metrics["step_time_s"] / 2
            whisker = max(0.0, value - half), value + half
        bars.append(Bar(name, value, text, ", ".join(map(str, (value, *ranks))), whisker, expected, ranks))
    return bars


def _scaling(rows: Sequence[Row], fixed: Callable[[Row], str]) -> list[Bar]:
    """Return bars that show scaling: for each engine, the fastest layout on each number of devices.

    Engines measured on only one number of devices have none. fixed: names what is held constant. A bar's line is
    perfect scaling: as many tokens/s on each device as on the fewest devices.
    """
    groups: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        if "tokens_per_s" in row.metrics:
            groups.setdefault((row.engine, fixed(row)), []).append(row)
    bars = []
    for (_, what), group in groups.items():
        fastest = {row.num_devices: row for row in sorted(group, key=lambda row: row.metrics["tokens_per_s"])}
        fewest = fastest[min(fastest)]
        for count in sorted(fastest) if len(fastest) > 1 else ():
            rate = fastest[count].metrics["tokens_per_s"]
            perfect = fewest.metrics["tokens_per_s"] / fewest.num_devices * count
            name = f"{fastest[count].text} (devices: {count}, {what})"
            bars.append(Bar(name, rate, f"{number(rate)} tokens/s, {rate / perfect:.0%}", str(rate), line=perfect))
    return bars


def paired_metrics(
    stages: Iterable[tuple[str, Sequence[StageReport | None]]],
) -> tuple[list[PairedMetric], list[PairedMetric]]:
    """Return the metrics that a stage has in both of two refreshes, split into differing and equal ones."""
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
    """Yield each stage that has metrics, with all of them as (name, value)."""
    for stage in report.stages:
        if stage.metrics:
            yield stage, list(stage.metrics.items())
