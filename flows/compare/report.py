"""Rows → what a comparison leaves: one HTML page that needs nothing else, the same as JSON, a note for MLflow's page.

The page has the table, and plots of throughput, memory, scaling and predictions.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from flows.compare.metrics import Row, rows_of
from flows.compare.plots import memory_plot, prediction_plot, scaling_plot, throughput_plot
from flows.compare.scaling import strong_scaling, weak_scaling
from flows.compare.table import as_json, as_markdown, grid
from flows.ledger.events import LayoutMeasured
from flows.ledger.record import RefreshRecord
from flows.ledger.refreshes import NOTE_FILE, REPORT_FILE, ROWS_FILE

TEMPLATE = Path(__file__).with_name("report.html.jinja")
PREDICTIONS = (("step_time_s", "predicted_step_time_s", "s a step"), ("peak_memory_gib", "predicted_memory_gib", "GiB"))


def html_report(title: str, facts: Sequence[str], rows: Sequence[Row]) -> str:
    """The page. facts: what was measured and how, a line each."""
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
    """What was measured of each layout of a comparison; leaves the page, the JSON and the note in `folder`."""
    rows = rows_of(record)
    assert record.comparison
    title = f"Layouts of {record.comparison.stage}: {record.refresh}"
    (folder / REPORT_FILE).write_text(html_report(title, facts_of(record), rows), encoding="utf-8")
    (folder / ROWS_FILE).write_text(json.dumps(comparison_as_json(record, rows, folder), indent=2))
    (folder / NOTE_FILE).write_text(as_markdown(rows), encoding="utf-8")
    return [LayoutMeasured(layout=n, metrics=dict(row.metrics), error=row.error) for n, row in enumerate(rows)]


def comparison_as_json(record: RefreshRecord, rows: Sequence[Row], folder: Path) -> dict[str, Any]:
    """The object that `compare --json` prints."""
    return {
        "comparison": record.refresh,
        "state": record.state,
        "error": record.error,
        "report": str(folder / REPORT_FILE),
        "layouts": as_json(rows),
    }


def facts_of(record: RefreshRecord) -> list[str]:
    """What was measured in a comparison, and how."""
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
