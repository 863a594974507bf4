"""Files that a comparison of layouts leaves: an HTML page, the same as JSON, a note for MLflow's page.

The page has the table, and plots of throughput, memory, scaling and predictions; it loads nothing from elsewhere.
"""

from __future__ import annotations

import io
import json
import math
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flows.compare.metrics import RANK_PREFIX, Row, rows_of
from flows.compare.table import as_json, as_markdown, grid
from flows.ledger.events import LayoutMeasured
from flows.ledger.record import RefreshRecord
from flows.ledger.refreshes import NOTE_FILE, REPORT_FILE, ROWS_FILE

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

WIDTH_INCHES = 9.0
BAR_INCHES = 0.55
LABEL_CHARACTERS = 38
"""Most characters in a line of a layout's name beside its bar."""
TEMPLATE = Path(__file__).with_name("report.html.jinja")
PREDICTIONS = (("step_time_s", "predicted_step_time_s", "s a step"), ("peak_memory_gib", "predicted_memory_gib", "GiB"))


def html_report(title: str, facts: Sequence[str], rows: Sequence[Row]) -> str:
    """Return the HTML page of a comparison. facts: what was measured and how, a line each."""
    import jinja2

    heading, *lines = grid(rows)
    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined)
    return environment.from_string(TEMPLATE.read_text(encoding="utf-8")).render(
        title=title,
        facts=facts,
        heading=heading,
        lines=lines,
        failures=[row for row in rows if row.error],
        plots=_plots(rows),
        scaling=[("Strong scaling", strong_scaling(rows)), ("Weak scaling", weak_scaling(rows))],
        scaling_plot=scaling_plot,
    )


def conclude(record: RefreshRecord, folder: Path) -> list[LayoutMeasured]:
    """Return the results of each layout of a comparison; write the page, the JSON and the note into `folder`."""
    rows = rows_of(record)
    assert record.comparison
    title = f"Layouts of {record.comparison.stage}: {record.refresh}"
    (folder / REPORT_FILE).write_text(html_report(title, facts_of(record), rows), encoding="utf-8")
    (folder / ROWS_FILE).write_text(json.dumps(comparison_as_json(record, rows, folder), indent=2))
    (folder / NOTE_FILE).write_text(as_markdown(rows), encoding="utf-8")
    return [LayoutMeasured(layout=n, metrics=dict(row.metrics), error=row.error) for n, row in enumerate(rows)]


def comparison_as_json(record: RefreshRecord, rows: Sequence[Row], folder: Path) -> dict[str, Any]:
    """Return the object that `compare --json` prints."""
    return {
        "comparison": record.refresh,
        "state": record.state,
        "error": record.error,
        "report": str(folder / REPORT_FILE),
        "layouts": as_json(rows),
    }


def facts_of(record: RefreshRecord) -> list[str]:
    """Return what was measured in a comparison, and how, a line each."""
    comparison = record.comparison
    assert comparison
    return [
        f"stage {comparison.stage} of {record.recipe_path} {' '.join(record.overrides)}".rstrip(),
        f"on {record.hardware}, commit {record.git_commit or 'unknown'}",
        f"{comparison.num_rounds} rounds in alternating order, each of {comparison.num_warmup_steps} warm-up and "
        f"{comparison.num_steps} measured steps on the same batches",
        "metrics are the median over rounds of the median over steps; the spread is the interquartile range of all "
        "measured steps",
    ]


def _plots(rows: Sequence[Row]) -> dict[str, str]:
    plots = {}
    if any("tokens_per_s" in row.metrics for row in rows):
        plots["Throughput"] = throughput_plot(rows)
    if any("peak_memory_gib" in row.metrics for row in rows):
        plots["Memory"] = memory_plot(rows)
    for measured, predicted, unit in PREDICTIONS:
        if any(measured in row.metrics and predicted in row.metrics for row in rows):
            plots[f"Predicted against measured: {unit}"] = prediction_plot(rows, measured, predicted, unit)
    return plots


def throughput_plot(rows: Sequence[Row]) -> str:
    """Return a plot of tokens/s by layout; the whisker shows half the spread of the step time."""
    measured = [row for row in rows if "tokens_per_s" in row.metrics]
    figure, axes = _bars(measured)
    rates = [row.metrics["tokens_per_s"] for row in measured]
    spreads = [rate * _relative_spread(row) / 2 for rate, row in zip(rates, measured, strict=True)]
    # The whisker must not reach below zero.
    below = [min(spread, rate) for spread, rate in zip(spreads, rates, strict=True)]
    axes.barh(range(len(measured)), rates, xerr=[below, spreads], capsize=3)
    axes.set_xlabel("tokens/s, all devices")
    return _svg(figure)


def memory_plot(rows: Sequence[Row]) -> str:
    """Return a plot of peak memory by layout: a bar for the largest, a dot a process, a cross for the prediction."""
    measured = [row for row in rows if "peak_memory_gib" in row.metrics]
    figure, axes = _bars(measured)
    axes.barh(range(len(measured)), [row.metrics["peak_memory_gib"] for row in measured], alpha=0.5, label="most")
    ranks = [
        (value, place)
        for place, row in enumerate(measured)
        for name, value in row.metrics.items()
        if name.startswith(RANK_PREFIX)
    ]
    predicted = [
        (row.metrics["predicted_memory_gib"], place)
        for place, row in enumerate(measured)
        if "predicted_memory_gib" in row.metrics
    ]
    for points, marker, label in ((ranks, "o", "each process"), (predicted, "x", "predicted")):
        if points:
            axes.scatter(*zip(*points, strict=True), marker=marker, color="black", label=label, zorder=3)
    axes.set_xlabel("peak memory of a process, GiB")
    figure.legend(loc="outside lower center", ncols=3)
    return _svg(figure)


def scaling_plot(series: Sequence[Series]) -> str:
    """Return a plot of tokens/s over devices, with the ideal as a dashed line, and efficiency at each point."""
    figure, axes = _figure(4.0)
    for line_of_engine in series:
        counts = [point.num_devices for point in line_of_engine.points]
        rates = [point.tokens_per_s for point in line_of_engine.points]
        label = f"{line_of_engine.engine}, {line_of_engine.fixed}"
        line = axes.plot(counts, rates, marker="o", label=label)[0]
        ideal = [rates[0] / counts[0] * count for count in counts]
        axes.plot(counts, ideal, linestyle="--", color=line.get_color(), alpha=0.5)
        for point in line_of_engine.points:
            place = (point.num_devices, point.tokens_per_s)
            axes.annotate(f"{point.efficiency:.0%}", place, textcoords="offset points", xytext=(4, -12))
    axes.set_xticks(sorted({point.num_devices for item in series for point in item.points}))
    axes.set_xlabel("devices")
    axes.set_ylabel("tokens/s")
    axes.set_ylim(bottom=0)
    axes.legend()
    return _svg(figure)


def prediction_plot(rows: Sequence[Row], measured_name: str, predicted_name: str, unit: str) -> str:
    """Return a plot of predicted over measured values; on the dashed line they are equal."""
    known = [row for row in rows if measured_name in row.metrics and predicted_name in row.metrics]
    figure, axes = _figure(4.0)
    for row in known:
        axes.scatter(row.metrics[measured_name], row.metrics[predicted_name], label=row.text)
    largest = max(max(row.metrics[measured_name], row.metrics[predicted_name]) for row in known)
    axes.plot([0, largest], [0, largest], linestyle="--", color="grey")
    axes.set_xlabel(f"measured, {unit}")
    axes.set_ylabel(f"predicted, {unit}")
    axes.legend(fontsize="small")
    return _svg(figure)


def _relative_spread(row: Row) -> float:
    """Return the spread over the step time; NaN, which is not drawn, where none was measured."""
    return row.metrics.get("step_time_iqr_s", math.nan) / row.metrics["step_time_s"]


def _bars(rows: Sequence[Row]) -> tuple[Figure, Axes]:
    figure, axes = _figure(1.0 + BAR_INCHES * len(rows))
    axes.set_yticks(range(len(rows)), [textwrap.fill(row.text, LABEL_CHARACTERS) for row in rows])
    axes.invert_yaxis()
    return figure, axes


def _figure(height_inches: float) -> tuple[Figure, Axes]:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(WIDTH_INCHES, height_inches), layout="constrained")
    FigureCanvasAgg(figure)
    return figure, figure.subplots()


def _svg(figure: Figure) -> str:
    stream = io.StringIO()
    figure.savefig(stream, format="svg", metadata={"Date": None})
    text = stream.getvalue()
    return text[text.index("<svg") :]


@dataclass(frozen=True)
class Point:
    """Fastest layout on a number of devices.

    efficiency: its tokens/s per device, over that on the fewest devices.
    """

    num_devices: int
    text: str
    tokens_per_s: float
    efficiency: float


@dataclass(frozen=True)
class Series:
    """Scaling of one engine over numbers of devices. fixed: what is held constant."""

    engine: str
    fixed: str
    points: tuple[Point, ...]


def strong_scaling(rows: Sequence[Row]) -> list[Series]:
    """Return a series for each engine and global batch size measured on several numbers of devices."""
    return _scaling(rows, lambda row: f"{row.global_batch_size} rows a step")


def weak_scaling(rows: Sequence[Row]) -> list[Series]:
    """Return a series for each engine and number of rows per device measured on several numbers of devices."""
    return _scaling(rows, lambda row: f"{row.global_batch_size / row.num_devices:g} rows a step and device")


def _scaling(rows: Sequence[Row], fixed: Callable[[Row], str]) -> list[Series]:
    measured = [row for row in rows if "tokens_per_s" in row.metrics]
    groups: dict[tuple[str, str], list[Row]] = {}
    for row in measured:
        groups.setdefault((row.engine, fixed(row)), []).append(row)
    series = [Series(engine, what, _points(group)) for (engine, what), group in groups.items()]
    return [one for one in series if len(one.points) > 1]


def _points(rows: Sequence[Row]) -> tuple[Point, ...]:
    fastest: dict[int, Row] = {}
    for row in sorted(rows, key=lambda row: row.metrics["tokens_per_s"]):
        fastest[row.num_devices] = row
    fewest = fastest[min(fastest)]
    alone = fewest.metrics["tokens_per_s"] / fewest.num_devices
    return tuple(
        Point(count, fastest[count].text, (rate := fastest[count].metrics["tokens_per_s"]), rate / count / alone)
        for count in sorted(fastest)
    )
