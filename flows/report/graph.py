"""Drawing of a refresh's DAG: positions of boxes and arrows from the stages and their references. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from flows.report.model import StageReport

WIDTH, HEIGHT = 148, 42
GAP_X, GAP_Y = 36, 16
MARGIN = 4


@dataclass(frozen=True)
class Box:
    """Stage in the drawing. x, y: its upper left corner, in pixels."""

    stage: StageReport
    x: int
    y: int


@dataclass(frozen=True)
class Drawing:
    """Boxes and arrows. arrows: SVG paths from the right side of a box to the left side of another."""

    boxes: tuple[Box, ...]
    arrows: tuple[str, ...]
    width: int
    height: int
    box_width: int = WIDTH
    box_height: int = HEIGHT


def draw(stages: Sequence[StageReport]) -> Drawing:
    """Place the stages from left to right, each one column after the last that it refers to. stages: upstream first."""
    columns: dict[str, int] = {}
    filled: Counter[int] = Counter()
    boxes: dict[str, Box] = {}
    for stage in stages:
        column = 1 + max((columns[name] for name in stage.upstream if name in columns), default=-1)
        x, y = MARGIN + column * (WIDTH + GAP_X), MARGIN + filled[column] * (HEIGHT + GAP_Y)
        columns[stage.name], boxes[stage.name] = column, Box(stage, x, y)
        filled[column] += 1
    arrows = [_arrow(boxes[name], box) for box in boxes.values() for name in box.stage.upstream if name in boxes]
    return Drawing(
        boxes=tuple(boxes.values()),
        arrows=tuple(arrows),
        width=2 * MARGIN + (len(filled) or 1) * (WIDTH + GAP_X) - GAP_X,
        height=2 * MARGIN + max(filled.values(), default=1) * (HEIGHT + GAP_Y) - GAP_Y,
    )


def _arrow(start: Box, end: Box) -> str:
    x1, y1, x2, y2 = start.x + WIDTH, start.y + HEIGHT // 2, end.x, end.y + HEIGHT // 2
    bend = max(18, (x2 - x1) // 2)
    return f"M{x1} {y1} C{x1 + bend} {y1} {x2 - bend} {y2} {x2 - 3} {y2}"
