"""Rows → plots, as SVG text that can stand in an HTML page."""

from __future__ import annotations

import io
import math
import textwrap
from collections.abc import Sequence
from typing import TYPE_CHECKING

from flows.compare.metrics import RANK_PREFIX, Row
from flows.compare.scaling import Series

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

WIDTH_INCHES = 9.0
BAR_INCHES = 0.55
LABEL_CHARACTERS = 38
"""Of a line of a layout's name beside its bar."""


def throughput_plot(rows: Sequence[Row]) -> str:
    """tokens/s by layout; the whisker is what half the spread of the step time comes to."""
    measured = [row for row in rows if "tokens_per_s" in row.metrics]
    figure, axes = _bars(measured)
    rates = [row.metrics["tokens_per_s"] for row in measured]
    spreads = [rate * _relative_spread(row) / 2 for rate, row in zip(rates, measured, strict=True)]
    below = [min(spread, rate) for spread, rate in zip(spreads, rates, strict=True)]  # there is no rate below zero
    axes.barh(range(len(measured)), rates, xerr=[below, spreads], capsize=3)
    axes.set_xlabel("tokens/s, all devices")
    return _svg(figure)


def memory_plot(rows: Sequence[Row]) -> str:
    """Peak memory by layout: a bar for the process that needs most, a dot for each, a cross for the prediction."""
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
    """tokens/s over devices, with the ideal as a dashed line, and efficiency at each point."""
    figure, axes = _figure(4.0)
    for one in series:
        counts = [point.num_devices for point in one.points]
        rates = [point.tokens_per_s for point in one.points]
        line = axes.plot(counts, rates, marker="o", label=f"{one.engine}, {one.fixed}")[0]
        ideal = [rates[0] / counts[0] * count for count in counts]
        axes.plot(counts, ideal, linestyle="--", color=line.get_color(), alpha=0.5)
        for point in one.points:
            place = (point.num_devices, point.tokens_per_s)
            axes.annotate(f"{point.efficiency:.0%}", place, textcoords="offset points", xytext=(4, -12))
    axes.set_xticks(sorted({point.num_devices for one in series for point in one.points}))
    axes.set_xlabel("devices")
    axes.set_ylabel("tokens/s")
    axes.set_ylim(bottom=0)
    axes.legend()
    return _svg(figure)


def prediction_plot(rows: Sequence[Row], measured_name: str, predicted_name: str, unit: str) -> str:
    """Predicted over measured; on the dashed line they are equal."""
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
    """NaN, which is drawn as nothing, where none was measured."""
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
