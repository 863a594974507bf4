"""Warnings about a refresh in view of earlier ones: a slow stage, an unusual score, a data set that shrank."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from itertools import islice

from flows.ledger.record import AttemptRecord, RefreshRecord
from flows.ledger.refreshes import ledgers
from stages.core.errors import StoreError
from stages.kinds.registry import makes

LEDGERS_READ = 30
"""Most earlier refreshes that are read, so that a warning costs no more after a year."""
REMEMBERED = 10
"""Number of earlier attempts at a stage with which one is compared."""
ENOUGH_RATES, ENOUGH_SCORES = 3, 5
SLOW = 2 / 3
SHRUNKEN = 0.9
"""Share of the last data set's size below which a data set counts as shrunken; people remove single rows on purpose."""
STANDARD_ERRORS = 2


def history_warnings(record: RefreshRecord) -> Iterator[str]:
    """Yield a warning for each stage built in this refresh that differs from its earlier builds."""
    built = {name: attempt for name in record.stages if (attempt := _built(record, name))}
    if not built or record.comparison:
        return
    earlier = list(islice(_earlier(record), LEDGERS_READ))
    for name, attempt in built.items():
        before = [(past, one) for past in earlier if (one := _built(past, name))]
        likes = [one for past, one in before if _equipment(past, one) == _equipment(record, attempt)]
        yield from _speed_warning(attempt, likes[:REMEMBERED])
        if makes(record.stages[name].kind, "scores"):
            yield from _score_warnings(attempt, [one for _, one in before[:REMEMBERED]])
        if before:
            yield from _size_warning(attempt, before[0][1])


def _earlier(record: RefreshRecord) -> Iterator[RefreshRecord]:
    """Yield earlier refreshes of the same recipe, the latest first."""
    for ledger in ledgers():
        if not ledger.folder.name.startswith(f"{record.recipe}-"):  # a look at the name saves reading it
            continue
        try:
            past = ledger.read()
        except (FileNotFoundError, StoreError):  # removed meanwhile, or damaged, which other commands name
            continue
        if past.recipe == record.recipe and not past.comparison and past.started_ms < record.started_ms:
            yield past


def _built(record: RefreshRecord, stage: str) -> AttemptRecord | None:
    """Return the attempt that built a stage in this very refresh; None if it was cached or failed."""
    finished = [attempt for attempt in record.attempts_at(stage) if attempt.outcome == "finished"]
    return finished[-1] if finished and record.stages[stage].state == "built" else None


def _equipment(record: RefreshRecord, attempt: AttemptRecord) -> tuple[object, ...]:
    tags = attempt.began.tags
    return record.hardware, tags.get("engine"), tags.get("layout"), attempt.began.num_devices


def _speed_warning(attempt: AttemptRecord, likes: list[AttemptRecord]) -> Iterator[str]:
    rate = attempt.metrics.get("tokens_per_s")
    rates = [past for one in likes if (past := one.metrics.get("tokens_per_s"))]
    if rate is None or len(rates) < ENOUGH_RATES:
        return
    median = statistics.median(rates)
    if rate < SLOW * median:
        yield (
            f"{attempt.began.stage}: {rate:,.0f} tokens/s; the last {len(rates)} attempts on the same hardware and "
            f"layout had a median of {median:,.0f}; look for other programs, heat, or a slower disk or network"
        )


def _score_warnings(attempt: AttemptRecord, before: list[AttemptRecord]) -> Iterator[str]:
    for name, score in attempt.metrics.items():
        past = [one.metrics[name] for one in before if name in one.metrics]
        if "." not in name or name.endswith("_stderr") or len(past) < ENOUGH_SCORES:
            continue
        low, high = min(past), max(past)
        # Of ten equally good models the next is the best or worst in one night of six: so far beyond is unusual.
        margin = max(STANDARD_ERRORS * attempt.metrics.get(f"{name}_stderr", 0.0), (high - low) / 2)
        if not low - margin <= score <= high + margin:
            yield (
                f"{attempt.began.stage}: {name} is {score:.4g}, and was {low:.4g} to {high:.4g} in the last "
                f"{len(past)} evaluations; look at the samples (`lifecycle show STAGE --samples`) and at what changed"
            )


def _size_warning(attempt: AttemptRecord, before: AttemptRecord) -> Iterator[str]:
    size, last = _data_size(attempt), _data_size(before)
    if size and last and size[1] == last[1] and size[0] < SHRUNKEN * last[0]:
        yield (
            f"{attempt.began.stage}: the data set shrank from {last[0]:,.0f} to {size[0]:,.0f} {size[1]}; "
            "look whether its source is whole"
        )


def _data_size(attempt: AttemptRecord) -> tuple[float, str] | None:
    """Return the size of the data set that an attempt made, with its unit; None for other products."""
    for name, unit in (("num_rows", "rows"), ("streamed_bytes", "bytes"), ("bytes", "bytes")):
        if name in attempt.metrics and (unit == "rows" or "dataset" in attempt.began.params):
            return attempt.metrics[name], unit
    return None
