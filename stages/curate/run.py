"""The curate stage: datasets → the rows of them that are worth learning from.

In: artifacts of datasets. Out: `data/train.jsonl`, rows as they were, in their order; `dropped.jsonl`, where each row
that was left out came from, and why; `report.json`, what each step kept and dropped, with examples.

Rows stream: steps that look at one row at a time write what they leave to the scratch folder; those that compare rows
keep numbers of them in memory, and not what they say. The same rows and steps give the same bytes.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from stages.core.contract import StageContext, StageResult
from stages.core.errors import full_disk_named
from stages.curate.config import CurateConfig
from stages.curate.near_duplicates import Comparison, Sets, set_of
from stages.curate.reading import rows_of
from stages.curate.report import Report
from stages.curate.row_steps import first_reason, row_steps
from stages.curate.spool import Spool, SpoolWriter

DROPPED_FILE = "dropped.jsonl"
REPORT_FILE = "report.json"
PROGRESS_EVERY = 1000


@dataclass(frozen=True)
class LeftOut:
    """What a step that compares rows leaves out. rows: of each, whether. reason: of one, by its number."""

    step: str
    rows: NDArray[np.bool_]
    reason: Callable[[int], str]


def run(config: CurateConfig, context: StageContext) -> StageResult:
    """Raises DataError for rows that cannot be read, formats that cannot be one dataset, and when nothing is left."""
    folder = context.scratch / "rows"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    with (
        full_disk_named("curating", context.work),
        (context.work / DROPPED_FILE).open("w", encoding="utf-8") as stream,
    ):
        report = Report(config.steps, stream)
        _spool(config, context, folder, report)
        report.check(config)
        spool = Spool(folder)
        _write(spool, list(_compared(config, context, spool, folder)), context, report)
        report.check(config)
    (context.work / REPORT_FILE).write_text(json.dumps(report.document(), indent=2, ensure_ascii=False))
    context.milestone(report.sentence())
    return StageResult(metrics=report.metrics(), files=[REPORT_FILE, DROPPED_FILE])


def _spool(config: CurateConfig, context: StageContext, folder: Path, report: Report) -> None:
    """Read all rows, and write those that are left by the steps of one row at a time to `folder`."""
    steps, near = list(row_steps(config, context)), config.near_duplicates
    with SpoolWriter(folder) as spool, Sets(folder) as sets:
        for place, row in rows_of(config, context, report):
            dropped = first_reason(steps, place, row)
            if dropped:
                report.drop(place, *dropped, row.content)
                continue
            spool.add(place, row.content, row.canonical())
            if near:
                sets.add(set_of(row.parts, row.label, near.words))


def _compared(config: CurateConfig, context: StageContext, spool: Spool, folder: Path) -> Iterator[LeftOut]:
    kept = np.ones(len(spool), np.bool_)
    if config.exact_duplicates:
        first = _first_equal(spool.digests)
        repeated = first != np.arange(len(first))
        kept &= ~repeated
        yield LeftOut(
            "exact_duplicates", repeated, lambda number: f"says the same as {spool.row(int(first[number])).place}"
        )
    if near := config.near_duplicates:
        repeats = Comparison(folder, kept, near.similarity).repeats(
            lambda done, total: (
                context.progress(done, total, "rows", "comparing") if not done % PROGRESS_EVERY else None
            )
        )
        yield LeftOut(
            "near_duplicates",
            repeats.of != np.arange(len(kept)),
            lambda number: (
                f"says nearly the same as {spool.row(int(repeats.of[number])).place} "
                f"(similarity {repeats.similarity[number]:.2f})"
            ),
        )


def _first_equal(digests: NDArray[np.uint64]) -> NDArray[np.int64]:
    """Of each row, the number of the first with its digest."""
    _, first, inverse = np.unique(digests, return_index=True, return_inverse=True)
    return first[inverse]


def _write(spool: Spool, left_out: Sequence[LeftOut], context: StageContext, report: Report) -> None:
    """Rows that no step leaves out, as they were; the others are reported."""
    shutil.rmtree(context.work / "data", ignore_errors=True)
    (context.work / "data").mkdir()
    with (context.work / "data" / "train.jsonl").open("w", encoding="utf-8") as stream:
        for row in spool.rows():
            dropped = next((one for one in left_out if one.rows[row.number]), None)
            if dropped:
                report.drop(row.place, dropped.step, dropped.reason(row.number), row.content)
            else:
                stream.write(json.dumps(row.content, ensure_ascii=False) + "\n")
