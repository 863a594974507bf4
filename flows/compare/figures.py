"""Trials of a layout → its figures, and the row that every table and plot is made of. Pure.

A machine that slows down for a while must not decide which layout is faster. So layouts take turns, round after round,
every other round in reverse order; a figure is the median over rounds of the median over a round's measured steps, and
the spread is the interquartile range of the measured steps of all rounds.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from flows.compare.record import ComparisonRecord, TrialEntry

PER_STEP = (
    "step_time_s",
    "tokens_per_s",
    "real_tokens_per_s",
    "tokens_per_s_per_device",
    "real_tokens_per_s_per_device",
    "mfu",
    "data_wait_fraction",
)
"""Measured in every step."""
PROFILED = "communication_fraction"
"""Measured in a step under a profiler, which makes that step slower."""
SOMETIMES = (PROFILED, "pipeline_bubble_fraction")
"""Not known of every step."""
PER_RUN = ("peak_memory_gib", "predicted_step_time_s", "predicted_memory_gib", "predicted_pipeline_bubble_fraction")
"""Final figures of a run."""
RANK_PREFIX = "peak_memory_gib_rank_"
REASON_CHARACTERS = 600


@dataclass(frozen=True)
class Row:
    """A layout with its figures by metric name, or the reason why it has none."""

    text: str
    engine: str
    num_devices: int
    global_batch_size: int
    params: Mapping[str, str]
    metrics: Mapping[str, float] = field(default_factory=dict)
    error: str | None = None
    run_id: str | None = None


def rows_of(record: ComparisonRecord) -> list[Row]:
    """A row a layout, in the order in which they were asked for."""
    rows = []
    for number, layout in enumerate(record.layouts):
        trials = record.trials_of(number)
        failed = next((trial for trial in trials if trial.error), None)
        measured = bool(trials) and not failed
        rows.append(
            Row(
                text=layout.text,
                engine=layout.engine,
                num_devices=layout.num_devices,
                global_batch_size=layout.global_batch_size,
                params=layout.params,
                metrics=figures(trials, record.num_warmup_steps) if measured else {},
                error=None if measured else layout.refused or _reason(failed),
            )
        )
    return with_differences(rows)


def figures(trials: Sequence[TrialEntry], num_warmup_steps: int) -> dict[str, float]:
    """Figures of a layout whose trials all succeeded."""
    rounds = [_measured_steps(trial, num_warmup_steps) for trial in trials]
    found = {name: _median_of_medians(name, rounds) for name in PER_STEP if name in rounds[0][0]}
    found["step_time_iqr_s"] = interquartile_range([step["step_time_s"] for steps in rounds for step in steps])
    for name in SOMETIMES:
        values = [step[name] for trial in trials for step in trial.steps if name in step]
        found |= {name: statistics.median(values)} if values else {}
    ranks = sorted((name for name in trials[0].metrics if name.startswith(RANK_PREFIX)), key=_rank)
    for name in (*PER_RUN, *ranks):
        values = [trial.metrics[name] for trial in trials if name in trial.metrics]
        found |= {name: statistics.median(values)} if values else {}
    return {**found, "loss": trials[0].steps[-1]["loss"]}


def with_differences(rows: Sequence[Row]) -> list[Row]:
    """The rows, each also in relation to the first one that was measured."""
    first = next((row for row in rows if row.metrics), None)
    return [replace(row, metrics={**row.metrics, **_differences(row, first)}) if first else row for row in rows]


def interquartile_range(values: Sequence[float]) -> float:
    """Width of the middle half of the values; 0 for a single one."""
    if len(values) < 2:
        return 0.0
    lower, _, upper = statistics.quantiles(values, n=4, method="inclusive")
    return upper - lower


def _differences(row: Row, first: Row) -> dict[str, float]:
    """The loss is comparable only on the same batches; tokens/s always."""
    found = {}
    if "tokens_per_s" in row.metrics and "tokens_per_s" in first.metrics:
        found["relative_tokens_per_s"] = row.metrics["tokens_per_s"] / first.metrics["tokens_per_s"]
    if "loss" in row.metrics and "loss" in first.metrics and row.global_batch_size == first.global_batch_size:
        found["loss_difference"] = row.metrics["loss"] - first.metrics["loss"]
    return found


def _measured_steps(trial: TrialEntry, num_warmup_steps: int) -> list[dict[str, float]]:
    """Without warm-up, and without the step under a profiler, unless there is no other."""
    steady = [step for step in trial.steps if step["step"] > num_warmup_steps]
    return [step for step in steady if PROFILED not in step] or steady


def _median_of_medians(name: str, rounds: Sequence[Sequence[Mapping[str, float]]]) -> float:
    return statistics.median(statistics.median(step[name] for step in steps if name in step) for steps in rounds)


def _rank(name: str) -> int:
    return int(name.removeprefix(RANK_PREFIX))


def _reason(failed: TrialEntry | None) -> str:
    if failed is None:
        return "was not reached"
    return first_line(f"{failed.error_class}: {failed.error}")


def first_line(message: str, most_characters: int = REASON_CHARACTERS) -> str:
    """The beginning of a message."""
    text = message.partition("\n")[0]
    return text if len(text) <= most_characters else f"{text[: most_characters - 1]}…"
