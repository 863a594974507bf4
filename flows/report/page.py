"""Writer of HTML reports, which load nothing from the network, with a drawing of the refresh's stages."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flows.ledger.record import RefreshRecord
from flows.ledger.refreshes import REPORT_FILE, ledger_of
from flows.report import tables
from flows.report.layouts import Row, grid
from flows.report.model import Curve, RefreshReport, StageReport, TrainingCurves
from flows.report.reading import read_report
from flows.store.record import Index
from stages.core.files import write_atomically

if TYPE_CHECKING:
    from jinja2 import Environment

FOLDER = Path(__file__).parent
STYLES = ("vendor/uPlot.min.css", "report.css")
SCRIPTS = ("vendor/uPlot.iife.min.js", "report.js")
TABLE_POINTS = 12
"""Number of a curve's points listed in a table for readers who cannot see the chart."""
WIDTH, HEIGHT = 148, 42
GAP_X, GAP_Y = 36, 16
MARGIN = 4
"""Pixels between the drawing and its edge. WIDTH and HEIGHT are a stage's box, GAP_X and GAP_Y the gaps between."""


def write_report(record: RefreshRecord, index: Index) -> Path:
    """Write the HTML report of a refresh (pipeline run) into the folder of its ledger (event log); return its path."""
    path = ledger_of(record.refresh).folder / REPORT_FILE
    write_atomically(path, page(read_report(record, index)))
    return path


def write_comparison(
    old: RefreshRecord, new: RefreshRecord, index: Index, differences: Mapping[str, Sequence[str]]
) -> Path:
    """Write the HTML page that compares two refreshes into the newer one's folder; return its path."""
    path = ledger_of(new.refresh).folder / f"compared-with-{old.refresh}.html"
    write_atomically(path, comparison_page(read_report(old, index), read_report(new, index), differences))
    return path


def page(report: RefreshReport) -> str:
    """Return the HTML report of one refresh."""
    return _render("report.html.jinja", report=report, charts=report.trainings)


def comparison_page(old: RefreshReport, new: RefreshReport, differences: Mapping[str, Sequence[str]]) -> str:
    """Return the HTML page that shows two refreshes side by side, with sentences on their differences by heading."""
    sides = [{one.name: one for one in report.stages} for report in (old, new)]
    return _render(
        "compare.html.jinja",
        sides=(old, new),
        differences=differences,
        stages=[(name, [side.get(name) for side in sides]) for name in sides[0] | sides[1]],
        charts=_side_by_side(old, new),
    )


def layouts_page(title: str, facts: Sequence[str], rows: Sequence[Row]) -> str:
    """Return the HTML page of layouts that separate runs measured. facts: lines that say what was measured."""
    return _render("layouts.html.jinja", title=title, facts=facts, rows=rows)


def _render(template: str, **values: Any) -> str:
    style, script = ("\n".join((FOLDER / name).read_text("utf-8") for name in names) for names in (STYLES, SCRIPTS))
    values |= {"style": style, "script": script, "tables": tables, "draw": draw, "grid": grid}
    return _environment().get_template(template).render(values)


def _environment() -> Environment:
    import jinja2

    environment = jinja2.Environment(
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        loader=jinja2.FileSystemLoader(FOLDER),
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {"number": tables.number, "moment": _moment, "points": _points, "drawn": _drawn}
    return environment


def _moment(time_ms: int) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(time_ms / 1000))


def _drawn(training: TrainingCurves) -> dict[str, Any]:
    """Return a chart's curves as JSON, for the script in the HTML page that draws them."""
    return training.model_dump(mode="json")


def _points(curve: Curve) -> list[tuple[int, float | None]]:
    """Return a few evenly spaced points of a curve, first and last included, for the table beside its chart."""
    last = len(curve.steps) - 1
    places = sorted({round(last * n / (TABLE_POINTS - 1)) for n in range(TABLE_POINTS)})
    return [(curve.steps[place], curve.values[place]) for place in places]


def _side_by_side(old: RefreshReport, new: RefreshReport) -> list[TrainingCurves]:
    """Return charts that draw the curves of a new refresh in front of those of an old one."""
    charts: dict[tuple[str, str], list[Curve]] = {}
    for report, behind in ((new, False), (old, True)):
        for training in report.trainings:
            own = [curve for curve in training.curves if not curve.behind]
            charts.setdefault((training.stage, training.chart), []).extend(
                curve.model_copy(update={"name": f"{curve.name}, {report.refresh}", "behind": behind}) for curve in own
            )
    return [TrainingCurves(stage=stage, chart=chart, curves=tuple(curves)) for (stage, chart), curves in charts.items()]


@dataclass(frozen=True)
class Box:
    """Box of one stage in a refresh's drawing. x, y: upper left corner, in pixels."""

    stage: StageReport
    x: int
    y: int


@dataclass(frozen=True)
class Drawing:
    """Drawing of a refresh's stages as boxes and arrows: SVG paths from a right side to another's left side."""

    boxes: tuple[Box, ...]
    arrows: tuple[str, ...]
    width: int
    height: int
    box_width: int = WIDTH
    box_height: int = HEIGHT


def draw(stages: Sequence[StageReport]) -> Drawing:
    """Place stages, upstream ones first, in columns, each to the right of all stages that it refers to."""
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
