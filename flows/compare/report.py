"""Rows → one HTML page that needs nothing else: the table, plots of throughput, memory, scaling and predictions."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from flows.compare.figures import Row
from flows.compare.plots import memory_plot, prediction_plot, scaling_plot, throughput_plot
from flows.compare.record import ComparisonRecord
from flows.compare.scaling import strong_scaling, weak_scaling
from flows.compare.table import grid

TEMPLATE = Path(__file__).with_name("report.html.jinja")
PREDICTIONS = (("step_time_s", "predicted_step_time_s", "s a step"), ("peak_memory_gib", "predicted_memory_gib", "GiB"))


def html_report(title: str, facts: Sequence[str], rows: Sequence[Row]) -> str:
    """The page. facts: what the figures are of and how they were taken, a line each."""
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


def facts_of(record: ComparisonRecord) -> list[str]:
    """What the figures of a comparison are of, and how they were taken."""
    return [
        f"stage {record.stage} of {record.recipe_path} {' '.join(record.overrides)}".rstrip(),
        f"on {record.hardware}, commit {record.git_commit or 'unknown'}",
        f"{record.num_rounds} rounds in alternating order, each of {record.num_warmup_steps} warm-up and "
        f"{record.num_steps} measured steps on the same batches",
        "figures are the median over rounds of the median over steps; the spread is the interquartile range of all "
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
