"""Progress display of a running refresh: a live table on a terminal, plain lines in a pipe or file.

A view is a thread that reads the refresh's record and the files that running stages write; it changes nothing.
"""

from __future__ import annotations

import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, TextIO

from flows.ledger.events import TrialEnded
from flows.ledger.record import ANOTHER_TRY, RefreshRecord, StageEntry
from flows.report.layouts import first_line
from flows.running.stage_observer import Tail
from stages.core.approval import AWAITED, REFUSED
from stages.core.lines import say, visible
from stages.core.metric_series import MetricSeries, metrics_size

if TYPE_CHECKING:
    from rich.console import Console, Group
    from rich.table import Table

WARNING = "warning: "
SHOWN = ("loss", "real_tokens_per_s", "mfu")
INTERVAL_S = 0.25
LOOKS_OF_A_WAIT = 4
STATE_STYLES = {
    "running": "bold cyan",
    "built": "green",
    "cached": "blue",
    "failed": "bold red",
    "cancelled": "yellow",
    "waiting": "dim",
}
UNPROMOTED = (REFUSED, AWAITED)
UNPROMOTED_STYLE = "bold yellow"
"""Verdicts of promote stages that keep the old champion, and their terminal style."""
ENDED = ("built", "cached", "failed", "cancelled")
SHOWN_METRICS = 3
WIDE = 100
"""Smallest terminal width, in characters, at which the table shows stage kinds and metrics of running stages."""
LINE_EVERY_S = 60.0
"""Seconds between two progress lines about a running stage when there is no terminal."""
AROUND_ROWS = 3
"""Number of lines that a table needs around its rows: title, heading and an empty line below."""
BAR_CELLS, DONE, LEFT = 10, "━", "·"
SHOWN_CHARACTERS = 120
"""Largest number of characters of a failure's reason while a comparison runs; the summary at its end shows more."""


class StageFeed:
    """Reader of the new progress events and metrics of one running stage, for the progress display."""

    def __init__(self, work: Path):
        self._events = Tail(work / "events.jsonl", at_end=True)
        self._series = MetricSeries(work, metrics_size(work))
        self._first: tuple[float, float] | None = None
        self.done: float | None = None
        self.total: float | None = None
        self.unit = ""
        self.doing = ""
        self.eta_s: float | None = None
        self.per_s: float | None = None
        self.metrics: dict[str, float] = {}

    def news(self) -> list[str]:
        """Read the stage's new events and metrics; return its new milestones and warnings."""
        messages = []
        for row in self._events.rows():
            if row.get("event") == "progress":
                self._note_progress(row)
            else:
                messages.append(f"{WARNING if row.get('event') == 'warning' else ''}{row.get('message', '')}")
        for logged in self._series.steps():
            self.metrics |= {name: logged.values[name] for name in SHOWN if name in logged.values}
        return messages

    def close(self) -> None:
        """Close the stage's event file."""
        self._events.close()

    def _note_progress(self, row: dict[str, object]) -> None:
        done, total = row.get("done"), row.get("total")
        if not isinstance(done, int | float) or not isinstance(total, int | float):
            self.done = self.total = self.eta_s = self.per_s = None
            self.doing = str(row.get("message", ""))
            return
        now_s = time.monotonic()
        # The rate counts from the first report on: steps of an earlier attempt took no time in this one.
        if self._first is None or total != self.total or done < self._first[1]:
            self._first = now_s, done
        started_s, first_done = self._first
        advanced = done - first_done
        self.per_s = advanced / (now_s - started_s) if advanced > 0 and now_s > started_s else None
        self.eta_s = (total - done) / self.per_s if self.per_s else None
        self.done, self.total, self.unit = done, total, str(row.get("unit", ""))


class View(ABC):
    """Progress display of a refresh, active inside a `with` block. `read` returns the refresh's current record."""

    def __init__(self, read: Callable[[], RefreshRecord]):
        self._read = read
        self._states: dict[str, tuple[str, str | None]] = {}
        self._feeds: dict[str, StageFeed] = {}
        self._num_trials = 0
        self._num_looks: dict[str, int] = {}
        self._warnings: set[str] = set()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._follow, daemon=True, name="view")

    def __enter__(self) -> View:
        self._thread.start()
        return self

    def __exit__(self, _: type[BaseException] | None, __: BaseException | None, ___: TracebackType | None) -> None:
        self._ended.set()
        self._thread.join()

    @abstractmethod
    def line(self, text: str) -> None:
        """Print a line that stays on the screen above the live table."""

    @abstractmethod
    def show(self, record: RefreshRecord) -> None:
        """Show the present progress of all stages, replacing what was shown before."""

    def _follow(self) -> None:
        while not self._ended.wait(INTERVAL_S):
            self._look()
        self._look()
        for feed in self._feeds.values():
            feed.close()

    def _look(self) -> None:
        record = self._read()
        for name, entry in record.stages.items():
            if entry.work and name not in self._feeds:
                self._feeds[name] = StageFeed(entry.work)
            seen = (entry.state, entry.error)
            is_news = self._states.get(name, ("waiting", None)) != seen
            self._states[name] = seen
            self._look_at_wait(name, entry)
            if is_news and entry.state == "running":
                self.line(f"{name:<16} {summary(entry)}")
            # Its last messages come before the line about its end.
            if name in self._feeds:
                for message in self._feeds[name].news():
                    if not self._is_repeated(message):
                        self.line(f"{name:<16} {message}")
            if is_news and (entry.state in ENDED or entry.error):
                self.line(f"{name:<16} {summary(entry)}")
        for trial in record.trials[self._num_trials :]:
            self.line(trial_text(record, trial))
        self._num_trials = len(record.trials)
        self.show(record)

    def _look_at_wait(self, name: str, entry: StageEntry) -> None:
        """Print once why a stage waits, after the stage has waited for a second."""
        waits = entry.state == "waiting" and entry.waits_for not in ("", ANOTHER_TRY)
        self._num_looks[name] = self._num_looks.get(name, 0) + 1 if waits else 0
        if self._num_looks[name] == LOOKS_OF_A_WAIT:
            self.line(f"{name:<16} waiting  for {entry.waits_for}")

    def _is_repeated(self, message: str) -> bool:
        """Return whether another stage has already had the same warning; the final summary names all such stages."""
        known = message in self._warnings
        if message.startswith(WARNING):
            self._warnings.add(message)
        return known


class PlainView(View):
    """Progress display as plain lines: start and end of each stage, milestones, and progress once a minute."""

    def __init__(self, read: Callable[[], RefreshRecord], stream: TextIO):
        super().__init__(read)
        self._stream = stream
        self._last_s: dict[str, float] = {}

    def line(self, text: str) -> None:
        say(text, self._stream)

    def show(self, record: RefreshRecord) -> None:
        """Print the progress of each running stage, at most one line a minute for each."""
        now_s = time.monotonic()
        for name, feed in self._feeds.items():
            if record.stages[name].state == "running" and now_s - self._last_s.setdefault(name, now_s) >= LINE_EVERY_S:
                self._last_s[name] = now_s
                if text := "  ".join(filter(None, [amounts_text(feed), metrics_text(feed.metrics)])):
                    self.line(f"{name:<16} {text}")


class TerminalView(View):
    """Progress display as a terminal table that is redrawn below the printed lines."""

    def __init__(self, read: Callable[[], RefreshRecord], console: Console):
        from rich.live import Live

        super().__init__(read)
        self._shown = read()
        self._console = console
        self._live = Live(console=console, auto_refresh=False, transient=False)

    def __enter__(self) -> View:
        self._live.start()
        return super().__enter__()

    def __exit__(self, *details: object) -> None:
        super().__exit__(None, None, None)
        self._live.update(self._table(None))  # the final table may be longer than the terminal
        self._live.stop()

    def line(self, text: str) -> None:
        self._console.print(visible(text), style="dim", markup=False, highlight=False)

    def show(self, record: RefreshRecord) -> None:
        self._shown = record
        self._live.update(self._table(self._console.height - AROUND_ROWS), refresh=True)

    def _table(self, num_rows: int | None) -> Group:
        from rich.console import Group

        # The terminal prints ^C on the empty line; after a row as wide as the terminal it would start a new line.
        return Group(stage_table(self._shown, self._feeds, self._console.width, num_rows), "")


def stage_table(
    record: RefreshRecord, feeds: dict[str, StageFeed], width: int = 120, num_rows: int | None = None
) -> Table:
    """Return the progress table of a refresh: each stage's state, progress, speed, time left and metrics.

    width: characters of the terminal. num_rows: stages that fit; running ones come first, then waiting ones.
    """
    from rich.table import Table
    from rich.text import Text

    is_wide = width >= WIDE
    headings = ("stage", "kind", "state", "progress", "") if is_wide else ("stage", "state", "progress")
    table = Table(title=Text(record.refresh), title_justify="left", box=None, pad_edge=False)
    for heading in headings:
        table.add_column(heading, no_wrap=heading != "")
    for name in _rows(record, num_rows):
        entry = record.stages[name]
        feed = feeds.get(name) if entry.state == "running" else None
        is_unpromoted = entry.verdict in UNPROMOTED
        style = UNPROMOTED_STYLE if is_unpromoted else STATE_STYLES.get(entry.state, "")
        outcome = metrics_text(feed.metrics) if feed else outcome_text(entry)
        state, progress = Text(entry.state, style=style), _progress(record, entry, feed)
        if is_wide:
            outcome_style = style if is_unpromoted else ""
            table.add_row(
                Text(name), entry.kind, state, Text(visible(progress)), Text(visible(outcome), style=outcome_style)
            )
        else:
            table.add_row(Text(name), state, Text(visible(progress if feed else f"{progress}  {outcome}".strip())))
    return table


def _rows(record: RefreshRecord, num_rows: int | None) -> list[str]:
    """Return the names of stages to show when a table is too short for all, preferably running or waiting ones."""
    names = list(record.stages)
    urgency = {"running": 0, "waiting": 1}
    first = sorted(names, key=lambda name: urgency.get(record.stages[name].state, 2))
    shown = set(first if num_rows is None else first[: max(num_rows, 1)])
    return [name for name in names if name in shown]


def _progress(record: RefreshRecord, entry: StageEntry, feed: StageFeed | None) -> str:
    if entry.state == "waiting":
        return waiting_text(record, entry)
    return progress_text(feed) if feed else seconds_text(entry)


def waiting_text(record: RefreshRecord, entry: StageEntry) -> str:
    """Return what a waiting stage waits for: a resource, or stages that are not done; "" for nothing."""
    missing = [name for name in entry.upstream if record.stages[name].state not in ("built", "cached")]
    return f"for {', '.join(missing) or entry.waits_for}" if missing or entry.waits_for else ""


def summary(entry: StageEntry) -> str:
    """Return one line about a stage's state, with its duration and metrics, or its error."""
    if entry.state == "running":
        return f"running  ({entry.reason})" if entry.reason else "running"
    if entry.state == "failed":
        return f"failed after {entry.seconds:.1f} s: {entry.error_class}: {entry.error}"
    if entry.state == "waiting" and entry.error:
        how = "killed" if entry.killed else "failed"
        return f"{how} after {entry.seconds:.1f} s, tried again: {entry.error_class}: {entry.error}"
    if entry.state == "cancelled":
        return f"cancelled after {entry.seconds:.1f} s"
    return f"{entry.state:<8} {seconds_text(entry):>9}  {outcome_text(entry)}".rstrip()


def trial_text(record: RefreshRecord, trial: TrialEnded) -> str:
    """Return one line about a finished trial (one run of one layout) of a layout comparison."""
    assert record.comparison
    layout = record.comparison.layouts[trial.layout].text
    outcome, reason = ("failed", first_line(trial.error, SHOWN_CHARACTERS)) if trial.error else ("measured", "")
    return f"round {trial.round}: {layout}: {outcome} in {trial.seconds:.1f} s  {reason}".rstrip()


def outcome_text(entry: StageEntry) -> str:
    """Return a stage's result as text: the verdict of one that promotes nothing, or its first few metrics."""
    return entry.verdict if entry.verdict in UNPROMOTED else metrics_text(headline(entry))


def headline(entry: StageEntry) -> dict[str, float]:
    """Return a stage's first few metrics, without standard errors."""
    shown = [(name, value) for name, value in entry.metrics.items() if not name.endswith("_stderr")]
    return dict(shown[:SHOWN_METRICS])


def metrics_text(metrics: dict[str, float]) -> str:
    """Return metrics as text, such as `loss 0.0123  tokens_per_s 8,012`."""
    texts = {name: _metric_text(name, value) for name, value in metrics.items()}
    return "  ".join(f"{name} {text}" for name, text in texts.items())


def _metric_text(name: str, value: float) -> str:
    if name == "mfu":
        return f"{value:.1%}"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def seconds_text(entry: StageEntry) -> str:
    """Return a finished stage's duration as text, such as `12.3 s`; "" while the stage runs."""
    return f"{entry.seconds:.1f} s" if entry.state in ENDED else ""


def progress_text(feed: StageFeed) -> str:
    """Return a stage's progress bar, such as `━━········ 120/600 steps, 4.1/s, 1:57 left`, or its present activity."""
    if feed.done is None or feed.total is None:
        return feed.doing
    done_cells = round(BAR_CELLS * min(1.0, feed.done / feed.total)) if feed.total else 0
    return f"{DONE * done_cells}{LEFT * (BAR_CELLS - done_cells)} {amounts_text(feed)}"


def amounts_text(feed: StageFeed) -> str:
    """Return a stage's progress as text, such as `120/600 steps, 4.1/s, 1:57 left`, or its present activity.

    A download's is such as `120/2,500 MB, 31 MB/s, 1:20 left`.
    """
    if feed.done is None or feed.total is None:
        return feed.doing
    if feed.unit == "B":
        rate = f", {feed.per_s / 1e6:.3g} MB/s" if feed.per_s else ""
        text = f"{feed.done / 1e6:,.0f}/{feed.total / 1e6:,.0f} MB{rate}"
    else:
        rate = f", {feed.per_s:.3g}/s" if feed.per_s else ""
        text = f"{feed.done:.0f}/{feed.total:.0f} {feed.unit}".rstrip() + rate
    if feed.eta_s is None:
        return text
    minutes, seconds = divmod(round(feed.eta_s), 60)
    hours, minutes = divmod(minutes, 60)
    left = f"{hours}:{minutes:02d}:{seconds:02d}" if hours else f"{minutes}:{seconds:02d}"
    return f"{text}, {left} left"
