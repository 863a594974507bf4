"""Rows → strong scaling (the same batch on more devices) and weak scaling (the same work for each device). Pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from flows.compare.metrics import Row


@dataclass(frozen=True)
class Point:
    """The fastest layout on a number of devices. `efficiency`: its tokens/s a device, over that on the fewest."""

    num_devices: int
    text: str
    tokens_per_s: float
    efficiency: float


@dataclass(frozen=True)
class Series:
    """One engine on growing numbers of devices, and what is held fixed meanwhile."""

    engine: str
    fixed: str
    points: tuple[Point, ...]


def strong_scaling(rows: Sequence[Row]) -> list[Series]:
    """One series for each engine and global batch size that was measured on several numbers of devices."""
    return _scaling(rows, lambda row: f"{row.global_batch_size} rows a step")


def weak_scaling(rows: Sequence[Row]) -> list[Series]:
    """One series for each engine and number of rows a device that was measured on several numbers of devices."""
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
