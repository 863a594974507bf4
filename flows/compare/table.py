"""Table of a comparison: for the terminal, the Prefect artifact and the `--json` object. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from flows.compare.metrics import RANK_PREFIX, Row

COLUMNS: Mapping[str, tuple[str, Callable[[float], str]]] = {
    "step_time_s": ("s/step", lambda value: f"{value:.4g}"),
    "step_time_iqr_s": ("±IQR", lambda value: f"{value:.2g}"),
    "tokens_per_s": ("tokens/s", lambda value: f"{value:,.0f}"),
    "tokens_per_s_per_device": ("/device", lambda value: f"{value:,.0f}"),
    "relative_tokens_per_s": ("×first", lambda value: f"{value:.2f}"),
    "mfu": ("MFU", lambda value: f"{value:.1%}"),
    "peak_memory_gib": ("GiB", lambda value: f"{value:.2f}"),
    "communication_fraction": ("comm", lambda value: f"{value:.0%}"),
    "pipeline_bubble_fraction": ("bubble", lambda value: f"{value:.0%}"),
    "loss": ("loss", lambda value: f"{value:.6f}"),
    "loss_difference": ("−first", lambda value: f"{value:+.1e}"),
    "predicted_step_time_s": ("pred s", lambda value: f"{value:.4g}"),
    "predicted_memory_gib": ("pred GiB", lambda value: f"{value:.2f}"),
}
"""Metric → its heading, and the function that formats a value."""


def as_text(rows: Sequence[Row], width: int | None = None) -> str:
    """Return a line for each measured layout, then the reasons of those that were not.

    width: characters of the terminal; a wider table is shown in parts, in which layouts have numbers.
    """
    lines = grid(rows)
    widths = [max(len(line[column]) for line in lines) for column in range(len(lines[0]))]
    table = [_aligned(line, widths) for line in lines]
    if width and len(table[0]) > width:
        table = _in_parts(lines, widths, width)
    return "\n".join([*table, *(f"{row.text}  {row.error}" for row in rows if row.error)])


def as_markdown(rows: Sequence[Row]) -> str:
    """Return the comparison as a Markdown table."""
    heading, *lines = grid(rows)
    table = [heading, ["---"] * len(heading), *lines]
    failures = [f"- `{row.text}`: {row.error}" for row in rows if row.error]
    return "\n".join([*(f"| {' | '.join(line)} |" for line in table), "", *failures])


def grid(rows: Sequence[Row]) -> list[list[str]]:
    """Return the comparison's grid: a heading and a line for each measured layout, without metrics that none has."""
    measured = [row for row in rows if not row.error]
    shown = [name for name in COLUMNS if any(name in row.metrics for row in measured)]
    heading = ["layout", "devices", *(COLUMNS[name][0] for name in shown)]
    lines = [heading]
    for row in measured:
        cells = (COLUMNS[name][1](row.metrics[name]) if name in row.metrics else "–" for name in shown)
        lines.append([row.text, str(row.num_devices), *cells])
    return lines


def as_json(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Return an object for each layout, with its parameters and all its metrics."""
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
    """Return a flat mapping of cells for each compared layout, with the same keys in each."""
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
