"""Curate stage: reads datasets, and writes the rows that are worth training on and a report of the others.

Out: `data/train.jsonl`, rows as they were, in their order; `dropped.jsonl`, with origin and reason of each row that was
left out; `report.json`, what each step kept and dropped, with examples.

Steps that look at one row at a time write the rows that they leave to the scratch folder; those that compare rows keep
only numbers in memory. The same rows and steps give the same bytes, also after a kill.
"""

import contextlib
import hashlib
import json
import os
import shutil
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from stages.core.contract import StageContext, StageResult, is_main_process
from stages.core.errors import DataError, full_disk_named
from stages.kinds.curate.config import CurateConfig, Sample
from stages.kinds.curate.judging import DroppedRow, Judgement, judged
from stages.kinds.curate.media import copy_media
from stages.kinds.curate.near_duplicates import JaccardComparison, SignatureWriter
from stages.kinds.curate.report import CurationReport
from stages.kinds.curate.row_steps import scored
from stages.kinds.curate.spool import SPOOL_FILES, KeptFiles, Spool, spool_row

DROPPED_FILE = "dropped.jsonl"
REPORT_FILE = "report.json"
Judge = Callable[[CurateConfig, StageContext, int], Generator[Judgement]]
"""Function that yields rows with their outcomes (`judging.judged`)."""
PROGRESS_EVERY = 1000
KEEP_EVERY = 2000
"""Number of rows after which curation saves a checkpoint; a killed stage repeats at most these."""


@dataclass(frozen=True)
class ExcludedRows:
    """Rows that a step drops after comparing all rows, bool [rows]. reason: returns that of a row's number."""

    step: str
    rows: NDArray[np.bool_]
    reason: Callable[[int], str]


def run(config: CurateConfig, context: StageContext) -> StageResult:
    """Curate the datasets, on as many nodes as the launcher started; the first one writes, and returns the result."""
    if os.environ.get("WORLD_SIZE", "1") == "1":
        return curate(config, context, judged)
    # Imports torch, which takes seconds.
    from stages.kinds.curate.nodes import joined_nodes

    with joined_nodes() as nodes:
        if is_main_process():
            return curate(config, context, nodes.judged)
        nodes.help(config, context)
        return StageResult()


def curate(config: CurateConfig, context: StageContext, judge: Judge) -> StageResult:
    """Curate the datasets; write the kept rows to `data/`, and report the dropped ones. judge: yields rows' outcomes.

    Raises DataError for rows that cannot be read, several formats, and where nothing is left to train on or hold out.
    """
    folder = context.scratch / "rows"
    with (
        full_disk_named("curating", context.work),
        KeptFiles(folder, (DROPPED_FILE, *SPOOL_FILES, *SignatureWriter.FILES)) as files,
        _shown(folder / DROPPED_FILE, context.work / DROPPED_FILE, files),
    ):
        report = CurationReport(config.steps, files[DROPPED_FILE])
        _spool(config, context, files, report, judge)
        report.check(config)
        spool = Spool(folder)
        comparison = JaccardComparison(folder, config.compared.similarity) if config.compared else None
        left_out = list(_left_out(config, context, spool, comparison))
        kept = ~np.logical_or.reduce([np.zeros(len(spool), np.bool_), *(step.rows for step in left_out)])
        held_out = _held_out(config, context, spool, comparison, kept) if kept.any() else ~kept
        report.num_held_out = int(held_out.sum()) if config.held_out else None
        _write(spool, left_out, held_out, context, report)
        try:
            report.check(config)
        except DataError as error:
            context.refuse(error)
    (context.work / REPORT_FILE).write_text(json.dumps(report.document(), indent=2, ensure_ascii=False))
    context.milestone(report.sentence())
    return StageResult(metrics=report.metrics(), files=[REPORT_FILE, DROPPED_FILE])


def _spool(config: CurateConfig, context: StageContext, files: KeptFiles, report: CurationReport, judge: Judge) -> None:
    """Write the rows that the single-row steps keep to temporary files, continuing where an earlier attempt was."""
    if files.state:
        report.restore(files.state)
        context.milestone(f"continuing after {report.num_read} rows")
    sets = SignatureWriter(files)
    num_kept = report.num_read
    with contextlib.closing(judge(config, context, num_kept)) as batches:
        for batch, outcomes in batches:
            for number, outcome in enumerate(outcomes, batch.number):
                if number % PROGRESS_EVERY == 0:
                    context.progress(number, batch.num_all, "rows", f"reading {batch.dataset}")
                if isinstance(outcome, DataError):
                    raise outcome
                report.read(batch.dataset)
                report.redacted.update(outcome.masked)
                if isinstance(outcome, DroppedRow):
                    report.drop(outcome.place, outcome.step, outcome.reason, outcome.content)
                else:
                    spool_row(files, outcome.line, outcome.digest)
                    if config.compared:
                        sets.add(outcome.runs, outcome.signature)
                if report.num_read - num_kept >= KEEP_EVERY:
                    num_kept = report.num_read
                    files.keep(report.state)
    files.keep(report.state)


@contextlib.contextmanager
def _shown(kept: Path, shown: Path, files: KeptFiles) -> Iterator[None]:
    """Copy a temporary file to the artifact when the context ends, so that users see it also if the stage fails."""
    try:
        yield
    finally:
        files[kept.name].flush()
        shutil.copyfile(kept, shown)


def _left_out(
    config: CurateConfig, context: StageContext, spool: Spool, comparison: JaccardComparison | None
) -> Iterator[ExcludedRows]:
    """Yield, for each step that looks at all rows together (duplicates, quality, sample), the rows that it drops."""
    kept = np.ones(len(spool), np.bool_)
    if config.exact_duplicates:
        first = _first_equal(spool.digests)
        repeated = first != np.arange(len(first))
        yield ExcludedRows(
            "exact_duplicates", repeated, lambda number: f"says the same as {spool.row(int(first[number])).place}"
        )
        kept &= ~repeated
    if comparison and config.near_duplicates:
        repeats = comparison.repeats(kept, _progress(context, "comparing"))
        similar = repeats.of != np.arange(len(kept))
        yield ExcludedRows(
            "near_duplicates",
            similar,
            lambda number: (
                f"says nearly the same as {spool.row(int(repeats.of[number])).place} "
                f"(similarity {repeats.similarity[number]:.2f})"
            ),
        )
        kept &= ~similar
    if quality := config.quality:
        totals = np.full(len(spool), np.nan)
        report = _progress(context, "judging")
        for number, total in scored(quality, (row for row in spool.rows() if kept[row.number]), context):
            totals[number] = total
            report(number, len(spool))
        poor = kept & ~(totals > quality.above)  # unlike `<=`, this drops NaN, too
        yield ExcludedRows(
            "quality", poor, lambda number: f"has the reward {totals[number]:g}, not above {quality.above:g}"
        )
        kept &= ~poor
    if config.sample:
        yield ExcludedRows(
            "sample", kept & ~drawn(spool.digests, kept, config.sample, config.seed), lambda _: "was not drawn"
        )


def drawn(digests: NDArray[np.uint64], kept: NDArray[np.bool_], config: Sample, seed: int) -> NDArray[np.bool_]:
    """Draw the random sample that the recipe asks for from the `kept` rows; returns a mask, bool [rows]."""
    numbers = ranks(digests, seed, "sample")
    if config.fraction is not None:
        return kept & below(numbers, config.fraction)
    candidates = np.flatnonzero(kept)
    chosen = candidates[np.argsort(numbers[candidates], kind="stable")[: config.rows]]  # those of the lowest numbers
    found = np.zeros(len(kept), np.bool_)
    found[chosen] = True
    return found


def ranks(digests: NDArray[np.uint64], seed: int, purpose: str) -> NDArray[np.uint64]:
    """Return a uniform random number for each row, uint64 [rows], from its content, the seed and the purpose."""
    salt = f"{purpose} {seed}".encode()
    found = (hashlib.blake2b(digest.tobytes() + salt, digest_size=8).digest() for digest in digests)
    return np.frombuffer(b"".join(found), np.uint64)


def below(numbers: NDArray[np.uint64], fraction: float) -> NDArray[np.bool_]:
    """Draw a share of rows as a mask, bool [rows]: those whose random number is in the lowest `fraction`."""
    return numbers < np.uint64(min(int(fraction * 2**64), 2**64 - 1))  # 2^64 itself, for a fraction of 1, does not fit


def _held_out(
    config: CurateConfig,
    context: StageContext,
    spool: Spool,
    comparison: JaccardComparison | None,
    kept: NDArray[np.bool_],
) -> NDArray[np.bool_]:
    """Return the validation rows, bool [rows], near-duplicates together; fail if either split would be empty."""
    if not (comparison and config.held_out):
        return np.zeros(len(spool), np.bool_)
    groups = comparison.groups(kept, _progress(context, "grouping"))
    numbers = ranks(spool.digests, config.seed, "held out")
    # Every row takes the number of its group's first row, so that a group is on one side.
    held_out = kept & below(numbers[groups], config.held_out.fraction)
    if not held_out.any() or not (kept & ~held_out).any():
        side = "trained on" if held_out.any() else "held out"
        context.refuse(
            DataError(
                f"`held_out`: a fraction of {config.held_out.fraction:g} of {len(np.unique(groups[kept]))} groups of "
                f"near-duplicates leaves no row to be {side}; change `fraction` or `seed`, or add rows"
            )
        )
    return held_out


def _progress(context: StageContext, doing: str) -> Callable[[int, int], None]:
    def report(done: int, total: int) -> None:
        if not done % PROGRESS_EVERY:
            context.progress(done, total, "rows", doing)

    return report


def _first_equal(digests: NDArray[np.uint64]) -> NDArray[np.int64]:
    """Return, for each row, the number of the first row with the same digest, to find exact duplicates."""
    _, first, inverse = np.unique(digests, return_index=True, return_inverse=True)  # digests [7, 5, 7] -> [0, 1, 0]
    return first[inverse]


def _write(
    spool: Spool,
    left_out: Sequence[ExcludedRows],
    held_out: NDArray[np.bool_],
    context: StageContext,
    report: CurationReport,
) -> None:
    """Write the rows that no step drops, unchanged but for masked data, and record the dropped ones in the report."""
    data = context.work / "data"
    shutil.rmtree(data, ignore_errors=True)  # of an attempt that ended while it wrote
    data.mkdir()
    copied: set[tuple[str, str]] = set()
    with contextlib.ExitStack() as files:
        splits = ("train", "validation") if held_out.any() else ("train",)
        streams = [files.enter_context((data / f"{split}.jsonl").open("w", encoding="utf-8")) for split in splits]
        for row in spool.rows():
            dropped = next((step for step in left_out if step.rows[row.number]), None)
            if dropped:
                report.drop(row.place, dropped.step, dropped.reason(row.number), row.content)
            else:
                copy_media(row, context.inputs[row.place.dataset] / "data", data, copied)
                # 0 is train, 1 is validation.
                streams[int(held_out[row.number])].write(json.dumps(row.content, ensure_ascii=False) + "\n")
