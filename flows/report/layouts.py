"""Results of a layout comparison: metrics of each layout from its trial runs, as a text table, Markdown or JSON.

A machine that slows down for a while must not decide which layout is faster. So layouts take turns, round after round,
every other round in reverse order; a metric is the median over rounds of the median over a round's measured steps, and
the spread is the interquartile range of the measured steps of all rounds.
"""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from flows.ledger.events import CompareBegan, LayoutMeasured, TrialEnded
from flows.ledger.record import RefreshRecord
from flows.ledger.refreshes import REPORT_FILE, ledger_of
from stages.core.metric_series import LoggedStep, MetricSeries
from stages.core.redaction import shortened
from stages.kinds.train.journal import PER_STEP

PROFILED = "communication_fraction"
"""Metric that only a training step run under the profiler has; profiling makes the step slower."""
SOMETIMES = (PROFILED, "pipeline_bubble_fraction")
"""Training metrics that only some steps log."""
PER_RUN = ("peak_memory_gib", "predicted_step_time_s", "predicted_memory_gib", "predicted_pipeline_bubble_fraction")
"""Metrics that a run logs once, at its end."""
RANK_PREFIX = "peak_memory_gib_rank_"
REASON_CHARACTERS = 600


@dataclass(frozen=True)
class Row:
    """Row in the results of a layout comparison: a layout with its metrics, or the reason why it has none."""

    text: str
    engine: str
    num_devices: int
    global_batch_size: int
    params: Mapping[str, str]
    metrics: Mapping[str, float] = field(default_factory=dict)
    error: str | None = None
    run_id: str | None = None


def rows_of(record: RefreshRecord) -> list[Row]:
    """Return each compared layout's result, in order; of a finished comparison, as recorded at its end."""
    comparison = record.comparison
    assert comparison, "only a comparison has rows"
    rows = []
    for number, layout in enumerate(comparison.layouts):
        noted = record.measured.get(number) or _measured(record, comparison, number)
        rows.append(
            Row(
                text=layout.text,
                engine=layout.engine,
                num_devices=layout.num_devices,
                global_batch_size=layout.global_batch_size,
                params=layout.params,
                metrics=noted.metrics,
                error=noted.error,
            )
        )
    return with_differences(rows)


def _measured(record: RefreshRecord, comparison: CompareBegan, number: int) -> LayoutMeasured:
    """Return the metrics of a layout over all rounds of trials, or the reason why there are none."""
    trials = record.trials_of(number)
    failed = next((trial for trial in trials if trial.error), None)
    if trials and not failed:
        metrics = metrics_of(trials, comparison.num_warmup_steps)
        return LayoutMeasured(layout=number, metrics=metrics, error=None if metrics else "its trials' files are gone")
    reason = first_line(f"{failed.error_class}: {failed.error}") if failed else None
    return LayoutMeasured(
        layout=number, metrics={}, error=reason or comparison.layouts[number].refused or "was not reached"
    )


def metrics_of(trials: Sequence[TrialEnded], num_warmup_steps: int) -> dict[str, float]:
    """Return the metrics of a layout from its successful trial runs; empty if a trial's metrics file is gone."""
    steps_of_trials = [list(MetricSeries(trial.work).steps()) for trial in trials]
    if not all(steps_of_trials):
        return {}
    rounds = [_measured_steps(steps, num_warmup_steps) for steps in steps_of_trials]
    metrics = {name: _median_of_medians(name, rounds) for name in PER_STEP if name in rounds[0][0].values}
    metrics["step_time_iqr_s"] = interquartile_range([step.values["step_time_s"] for steps in rounds for step in steps])
    for name in SOMETIMES:
        values = [step.values[name] for steps in steps_of_trials for step in steps if name in step.values]
        metrics |= {name: statistics.median(values)} if values else {}
    ranks = [name for name in trials[0].metrics if name.startswith(RANK_PREFIX)]
    ranks.sort(key=lambda name: int(name.removeprefix(RANK_PREFIX)))
    for name in (*PER_RUN, *ranks):
        values = [trial.metrics[name] for trial in trials if name in trial.metrics]
        metrics |= {name: statistics.median(values)} if values else {}
    return {**metrics, "loss": steps_of_trials[0][-1].values["loss"]}


def with_differences(rows: Sequence[Row]) -> list[Row]:
    """Return a comparison's rows with throughput and loss relative to the first measured layout added."""
    first = next((row for row in rows if row.metrics), None)
    return [replace(row, metrics={**row.metrics, **_differences(row, first)}) if first else row for row in rows]


def interquartile_range(values: Sequence[float]) -> float:
    """Return the interquartile range, the width of the middle half of the values; 0 for a single value."""
    if len(values) < 2:
        return 0.0
    lower, _, upper = statistics.quantiles(values, n=4, method="inclusive")
    return upper - lower


def _differences(row: Row, first: Row) -> dict[str, float]:
    """Return a layout's throughput and loss relative to the first's; the loss only for equal batch sizes."""
    relative = {}
    if "tokens_per_s" in row.metrics and "tokens_per_s" in first.metrics:
        relative["relative_tokens_per_s"] = row.metrics["tokens_per_s"] / first.metrics["tokens_per_s"]
    if "loss" in row.metrics and "loss" in first.metrics and row.global_batch_size == first.global_batch_size:
        relative["loss_difference"] = row.metrics["loss"] - first.metrics["loss"]
    return relative


def _measured_steps(steps: Sequence[LoggedStep], num_warmup_steps: int) -> list[LoggedStep]:
    """Return the training steps after the warm-up, without the profiled one unless it is the only one."""
    steady = [step for step in steps if step.step > num_warmup_steps]
    return [step for step in steady if PROFILED not in step.values] or steady


def _median_of_medians(name: str, rounds: Sequence[Sequence[LoggedStep]]) -> float:
    return statistics.median(
        statistics.median(step.values[name] for step in steps if name in step.values) for steps in rounds
    )


def first_line(message: str, most_characters: int = REASON_CHARACTERS) -> str:
    """Return the first line of a message, cut to `most_characters`."""
    return shortened(message.partition("\n")[0], most_characters)


COLUMNS: Mapping[str, tuple[str, str]] = {
    "step_time_s": ("s/step", ".4g"),
    "step_time_iqr_s": ("±IQR", ".2g"),
    "tokens_per_s": ("tokens/s", ",.0f"),
    "tokens_per_s_per_device": ("/device", ",.0f"),
    "relative_tokens_per_s": ("×first", ".2f"),
    "mfu": ("MFU", ".1%"),
    "peak_memory_gib": ("GiB", ".2f"),
    "communication_fraction": ("comm", ".0%"),
    "pipeline_bubble_fraction": ("bubble", ".0%"),
    "loss": ("loss", ".6f"),
    "loss_difference": ("−first", "+.1e"),
    "predicted_step_time_s": ("pred s", ".4g"),
    "predicted_memory_gib": ("pred GiB", ".2f"),
}
"""Column heading and number format of each metric in a comparison's table, by metric name."""


def as_text(rows: Sequence[Row], width: int | None = None) -> str:
    """Return the comparison as a text table, followed by the reasons for layouts without measurements.

    width: characters of the terminal; a wider table is shown in parts, in which layouts have numbers.
    """
    lines = grid(rows)
    widths = [max(len(line[column]) for line in lines) for column in range(len(lines[0]))]
    table = [_aligned(line, widths) for line in lines]
    if width and len(table[0]) > width:
        table = _in_parts(lines, widths, width)
    return "\n".join([*table, *(f"{row.text}  {row.error}" for row in rows if row.error)])


def as_markdown(rows: Sequence[Row]) -> str:
    """Return the comparison as a Markdown table, followed by the reasons for layouts that were not measured."""
    heading, *lines = grid(rows)
    table = [heading, ["---"] * len(heading), *lines]
    failures = [f"- `{row.text}`: {row.error}" for row in rows if row.error]
    return "\n".join([*(f"| {' | '.join(line)} |" for line in table), "", *failures])


def grid(rows: Sequence[Row]) -> list[list[str]]:
    """Return a comparison's table as cells: a heading, a line per measured layout; no column that is empty."""
    measured = [row for row in rows if not row.error]
    shown = [name for name in COLUMNS if any(name in row.metrics for row in measured)]
    heading = ["layout", "devices", *(COLUMNS[name][0] for name in shown)]
    lines = [heading]
    for row in measured:
        cells = (format(row.metrics[name], COLUMNS[name][1]) if name in row.metrics else "–" for name in shown)
        lines.append([row.text, str(row.num_devices), *cells])
    return lines


def comparison_as_json(record: RefreshRecord, rows: Sequence[Row]) -> dict[str, Any]:
    """Return the JSON object that `lifecycle compare --json` prints."""
    return {
        "comparison": record.refresh,
        "state": record.state,
        "error": record.error,
        "report": str(ledger_of(record.refresh).folder / REPORT_FILE),
        "layouts": as_json(rows),
    }


def as_json(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Return a JSON object for each compared layout, with its parameters and all its metrics."""
    return [
        {
            "layout": row.text,
            "engine": row.engine,
            "num_devices": row.num_devices,
            "global_batch_size": row.global_batch_size,
            "params": dict(row.params),
            "metrics": dict(row.metrics),
            "error": row.error,
            "mlflow_run_id": row.run_id,
        }
        for row in rows
    ]


def cells(rows: Sequence[Row]) -> list[dict[str, str | int | float | None]]:
    """Return a dict of table cells for each compared layout, all with the same keys, for Prefect's page of the run."""
    names = [name for name in COLUMNS if any(name in row.metrics for row in rows)]
    ranks = list(dict.fromkeys(name for row in rows for name in row.metrics if name.startswith(RANK_PREFIX)))
    return [
        {
            "layout": row.text,
            "num_devices": row.num_devices,
            **{name: row.metrics.get(name) for name in (*names, *ranks)},
            "error": row.error,
        }
        for row in rows
    ]


def _in_parts(lines: Sequence[Sequence[str]], widths: Sequence[int], width: int) -> list[str]:
    numbers = ["", *map(str, range(1, len(lines)))]
    taken = num_characters = len(numbers[-1])
    parts: list[list[int]] = [[]]
    for column in range(1, len(widths)):
        taken += 2 + widths[column]
        if taken > width and parts[-1]:
            parts.append([])
            taken = num_characters + 2 + widths[column]
        parts[-1].append(column)
    shown = [f"{number}  {line[0]}" for number, line in zip(numbers[1:], lines[1:], strict=True)]
    for part in parts:
        cells = [[number, *(line[column] for column in part)] for number, line in zip(numbers, lines, strict=True)]
        shown += ["", *(_aligned(line, [num_characters, *(widths[column] for column in part)]) for line in cells)]
    return shown


def _aligned(line: Sequence[str], widths: Sequence[int]) -> str:
    first, *others = line
    return "  ".join(
        [first.ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(others, widths[1:], strict=True))]
    )
