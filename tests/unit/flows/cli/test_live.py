"""A terminal shows a live table of running stages; a file gets lines instead."""

import codecs
import io
import json
import os
import re
import shutil
import termios
import threading
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from rich.console import Console

from flows.cli import live
from flows.cli.live import PlainView, StageFeed, TerminalView, metrics_text, progress_text, stage_table
from flows.ledger.events import AttemptBegan, AttemptEnded, PlannedEntry, StageCached, StageWaits
from flows.ledger.record import after, fold
from flows.ledger.refreshes import ledger_of
from tests.beginnings import beginning

ROWS, COLUMNS = 24, 80
SEQUENCE = re.compile(r"\x1b\[([?0-9;]*)([A-Za-z])|\x1b\]8;[^\x1b]*\x1b\\\\|([\s\S])")


def test_utilization_is_a_percentage_and_large_numbers_have_no_fraction():
    assert metrics_text({"loss": 0.01234, "tokens_per_s": 8012.4, "mfu": 0.4026}) == (
        "loss 0.01234  tokens_per_s 8,012  mfu 40.3%"
    )


@pytest.fixture
def record(tmp_path, monkeypatch):
    """Provide the record of a refresh whose only stage failed, with a two-line error and many metrics."""
    monkeypatch.setenv("LIFECYCLE_HOME", str(tmp_path))
    ledger = ledger_of("nightly-1")
    ledger.append(beginning(tmp_path, {"sft": "train"}))
    ledger.append(AttemptBegan(stage="sft", number=1, work=tmp_path, first_byte=0, params={}, tags={}))
    metrics = {f"a_metric_with_a_very_long_name_{number}": 1.0 for number in range(3)}
    ledger.append(
        AttemptEnded(
            stage="sft", number=1, outcome="finished", folder=tmp_path, last_byte=0, seconds=1.0, metrics=metrics
        )
    )
    return ledger.read()


def screen_of(written: str) -> list[str]:
    """Return the lines that a terminal shows after some output, including those that have scrolled away."""
    lines, row, column = [""], 0, 0
    for match in SEQUENCE.finditer(written):
        parameter, command, character = match.groups()
        number = int(parameter) if parameter and parameter.isdigit() else 1
        if command == "A":
            row = max(0, row - number)
        elif command == "K":
            lines[row] = "" if parameter == "2" else lines[row][:column]
        elif character == "\r":
            column = 0
        elif character == "\n":
            row += 1
        elif character:
            if column == COLUMNS:
                row, column = row + 1, 0
            lines += [""] * (row + 1 - len(lines))
            lines[row] = lines[row].ljust(column)[:column] + character + lines[row][column + 1 :]
            column += 1
        lines += [""] * (row + 1 - len(lines))
    return [line.rstrip() for line in lines]


class Terminal:
    """Pseudo-terminal of the operating system, which echoes what is typed and collects all output."""

    def __init__(self) -> None:
        self._master, slave = os.openpty()
        termios.tcsetwinsize(slave, (ROWS, COLUMNS))
        self.stream = os.fdopen(slave, "w")
        self.written = ""
        self._decoder = codecs.getincrementaldecoder("utf-8")()  # a piece may end within a character
        self._seen = 0
        self._changed = threading.Condition()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def type(self, text: str) -> None:
        os.write(self._master, text.encode())

    def wait_for(self, text: str) -> None:
        """Wait until a text is written to the terminal, after the text of the previous call."""
        with self._changed:
            self._changed.wait_for(lambda: text in self.written[self._seen :])
            self._seen = self.written.index(text, self._seen) + len(text)

    def close(self) -> None:
        self.stream.close()
        self._reader.join()
        os.close(self._master)

    def _read(self) -> None:
        while data := self._piece():
            with self._changed:
                self.written += self._decoder.decode(data)
                self._changed.notify_all()

    def _piece(self) -> bytes:
        try:
            return os.read(self._master, 65536)
        except OSError:  # no process has it open any more
            return b""


@pytest.mark.parametrize("typed", ["", "\x03", "\x03\x03"])
def test_the_table_leaves_no_line_behind_when_somebody_presses_ctrl_c(record, typed):
    terminal = Terminal()
    with TerminalView(lambda: record, Console(file=terminal.stream, width=COLUMNS)):
        terminal.wait_for("nightly-1")
        for key in typed:
            terminal.type(key)
            terminal.wait_for("^C")
        terminal.wait_for("nightly-1")
    terminal.close()
    screen = screen_of(terminal.written)
    assert [line for line in screen if "nightly-1" in line] == ["nightly-1"]
    assert not any("^C" in line for line in screen)


@pytest.fixture
def refused(tmp_path, monkeypatch):
    """Provide a function that makes the record of a refresh whose refusal to promote is new or cached."""
    monkeypatch.setenv("LIFECYCLE_HOME", str(tmp_path))
    said = {"metrics": {"gates_missed": 1.0}, "tags": {"verdict": "not promoted"}}
    (tmp_path / "result.json").write_text(json.dumps(said))
    began = beginning(tmp_path, {"promote": "promote"})
    attempt = {"stage": "promote", "number": 1}
    events = {
        "cached": [StageCached(stage="promote", artifact=tmp_path, attempt=None, seconds=0.0)],
        "built": [
            AttemptBegan(**attempt, work=tmp_path, first_byte=0, params={}, tags={}),
            AttemptEnded(**attempt, outcome="finished", folder=tmp_path, last_byte=0, seconds=0.0, **said),
        ],
    }
    return lambda state: fold([began, *events[state]])


@pytest.mark.parametrize("state", ["built", "cached"])
def test_a_refusal_reads_the_same_whether_it_is_fresh_or_found_cached(refused, state):
    record = refused(state)
    stream, terminal = io.StringIO(), Console(file=io.StringIO(), width=COLUMNS, force_terminal=True)
    with PlainView(lambda: record, stream):
        pass
    terminal.print(stage_table(record, {}))
    [line] = stream.getvalue().splitlines()
    assert line[9:].split() == ["promote", state, "0.0", "s", "not", "promoted"]
    [row] = [line for line in terminal.file.getvalue().splitlines() if "not promoted" in line]
    assert re.findall(r"\x1b\[([\d;]+)m([\w ]+)\x1b", row) == [("1;33", state), ("1;33", "not promoted")]


@pytest.fixture
def shown():
    """Provide a function that shows a refresh's successive records in the plain-text view, and returns the lines."""

    def shown(*steps):
        stream, seen, left = io.StringIO(), threading.Event(), list(steps)

        def read():
            if len(left) > 1:
                return left.pop(0)()
            record = left[0]()
            seen.set()
            return record

        with PlainView(read, stream):
            assert seen.wait(600)
        return [line[9:] for line in stream.getvalue().splitlines()]

    return shown


def test_that_a_stage_runs_again_is_said_before_what_it_says_itself(record, shown, tmp_path):
    """The live view announces a retry of a stage before the messages of the retry itself."""
    began = AttemptBegan(stage="sft", number=2, work=tmp_path, first_byte=0, params={}, tags={})
    second = after(record, began)
    first = replace(second, stages={"sft": replace(second.stages["sft"], state="waiting")})

    def say():
        with (tmp_path / "events.jsonl").open("w") as stream:
            stream.write('{"event": "milestone", "message": "from step 50"}\n')
        return second

    assert [line.split(maxsplit=1)[1] for line in shown(lambda: first, say)] == ["running", "from step 50"]


def test_an_attempt_that_was_killed_and_is_tried_again_is_said_to_be(record, shown, tmp_path):
    began = [
        AttemptBegan(stage="sft", number=number, work=tmp_path, first_byte=0, params={}, tags={}) for number in (2, 3)
    ]
    ended = {"outcome": "killed", "retried": True, "error": "sft was killed", "error_class": "StageCrashError"}
    killed = AttemptEnded(stage="sft", number=2, folder=tmp_path, last_byte=0, seconds=3.0, **ended)
    steps = [first := after(record, began[0]), second := after(first, killed), after(second, began[1])]
    assert [line.split(maxsplit=1)[1] for line in shown(*(lambda step=step: step for step in steps))] == [
        "running",
        "killed after 3.0 s, tried again: StageCrashError: sft was killed",
        "running",
    ]


def test_what_a_stage_and_the_program_after_its_commit_say_last_is_shown(record, shown, tmp_path):
    """The live view shows the last messages of a stage and of the program after it, from moved or removed folders."""
    work = tmp_path / "work"
    running = after(record, AttemptBegan(stage="sft", number=2, work=work, first_byte=0, params={}, tags={}))

    def begin():
        work.mkdir()
        (work / "events.jsonl").touch()
        return running

    def say(message):
        with (work / "events.jsonl").open("a") as stream:
            stream.write(json.dumps({"event": "milestone", "message": message}) + "\n")

    def commit_and_begin():
        say("promoted")
        work.rename(tmp_path / "artifact")
        return begin()

    def complete():
        if work.exists():  # the view looks at the last step until its end
            say("version 1 is champion")
            shutil.rmtree(work)
        return running

    lines = [line.split(maxsplit=1)[1] for line in shown(begin, commit_and_begin, complete)]
    assert lines == ["running", "promoted", "version 1 is champion"]


def test_what_two_stages_warn_of_is_shown_once_while_they_run(record, shown, tmp_path):
    began = AttemptBegan(stage="sft", number=2, work=tmp_path, first_byte=0, params={}, tags={})
    sft = after(record, began).stages["sft"]
    (tmp_path / "other").mkdir()
    both = replace(record, stages={"sft": sft, "dpo": replace(sft, work=tmp_path / "other")})

    def warn():
        events = [{"event": "warning", "message": "it is 0"}, {"event": "milestone", "message": "done"}]
        for folder in (tmp_path, tmp_path / "other"):
            (folder / "events.jsonl").write_text("".join(json.dumps(one) + "\n" for one in events))
        return both

    lines = [line.split(maxsplit=1) for line in shown(lambda: both, warn)]
    assert lines[2:] == [["sft", "warning: it is 0"], ["sft", "done"], ["dpo", "done"]]


def test_every_line_of_a_file_has_its_time():
    stream = io.StringIO()
    PlainView(lambda: None, stream).line("sft failed: it was killed\nits log ends with:\n  the last line")
    assert [line[9:] for line in stream.getvalue().splitlines()] == [
        "sft failed: it was killed",
        "its log ends with:",
        "  the last line",
    ]
    assert re.fullmatch(r"(\d\d:\d\d:\d\d .*\n)+", stream.getvalue())


@pytest.fixture
def busy(tmp_path, monkeypatch):
    """Provide the record of a refresh in which a stage runs, one waits for that stage, and one for a device."""
    monkeypatch.setenv("LIFECYCLE_HOME", str(tmp_path))
    planned = {
        "preferences": PlannedEntry(kind="train", version="0" * 12),
        "evaluate-preferences": PlannedEntry(kind="evaluate", version="1" * 12, upstream=("preferences",)),
        "evaluate-base": PlannedEntry(kind="evaluate", version="2" * 12),
    }
    began = beginning(tmp_path, {}, stages=planned)
    attempt = AttemptBegan(stage="preferences", number=1, work=tmp_path, first_byte=0, params={}, tags={})
    feed = StageFeed(tmp_path)
    feed.done, feed.total, feed.unit, feed.per_s, feed.eta_s = 480.0, 1200.0, "steps", 8.25, 87.3
    feed.metrics = {"loss": 0.0123, "tokens_per_s": 8012.0}
    return fold([began, attempt, StageWaits(stage="evaluate-base", reason="free devices, of 2")]), feed


@pytest.mark.parametrize("columns", [80, 120])
def test_the_table_shows_progress_rate_and_time_left_in_80_columns_and_in_120(busy, columns):
    record, feed = busy
    console = Console(file=io.StringIO(), width=columns, no_color=True)
    console.print(stage_table(record, {"preferences": feed}, columns))
    lines = console.file.getvalue().splitlines()
    assert max(map(len, lines)) <= columns
    [running] = [line for line in lines if line.startswith("preferences")]
    assert "running" in running
    assert "━━━━······ 480/1200 steps, 8.25/s, 1:27 left" in running
    [waiting] = [line.rstrip() for line in lines if line.startswith("evaluate-preferences")]
    assert waiting.endswith("waiting  for preferences")
    assert ("train" in running) == (columns == 120)


def test_in_a_low_terminal_the_table_keeps_what_runs_and_what_waits(busy):
    record, feed = busy
    ended = {f"built-{number}": replace(record.stages["evaluate-base"], state="built") for number in range(30)}
    record = replace(record, stages={**ended, **record.stages})
    shown = [stage_table(record, {"preferences": feed}, 80, num_rows).row_count for num_rows in (None, 21, 2, -1)]
    assert shown == [33, 21, 2, 1]
    [names, *_] = (list(column.cells) for column in stage_table(record, {}, 80, 4).columns)
    assert list(map(str, names)) == ["built-0", *list(record.stages)[-3:]]


def test_brackets_in_what_a_stage_does_are_text(busy):
    record, feed = busy
    feed.done, feed.doing = None, "reading [bold]/data[/x].jsonl"
    console = Console(file=io.StringIO(), width=120, no_color=True)
    console.print(stage_table(record, {"preferences": feed}, 120))
    assert "reading [bold]/data[/x].jsonl" in console.file.getvalue()


def test_what_waits_says_for_what_once_in_a_file(busy):
    record, _ = busy
    stream, seen, looks = io.StringIO(), threading.Event(), []

    def read():
        looks.append(1)
        if len(looks) > 6:
            seen.set()
        return record

    with PlainView(read, stream):
        assert seen.wait(600)
    lines = [line[9:].split(maxsplit=1) for line in stream.getvalue().splitlines()]
    said = [" ".join(text.split()) for name, text in lines if name == "evaluate-base"]
    assert said == ["waiting for free devices, of 2"]


def test_bytes_are_shown_as_megabytes_and_hours_as_hours(busy):
    _, feed = busy
    feed.done, feed.total, feed.unit, feed.per_s, feed.eta_s = 1.5e9, 15e9, "B", 31e6, 13_500.0
    assert progress_text(feed) == "━········· 1,500/15,000 MB, 31 MB/s, 3:45:00 left"


@pytest.mark.parametrize("colourless", [True, False])
def test_colours_are_off_when_asked(record, monkeypatch, colourless):
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm-256color")
    if colourless:
        monkeypatch.setenv("NO_COLOR", "1")
    terminal = Terminal()
    with TerminalView(lambda: record, Console(file=terminal.stream, width=COLUMNS)):
        terminal.wait_for("nightly-1")
    terminal.close()
    colours = re.findall(r"\x1b\[[\d;]*3\d[\d;]*m", terminal.written)
    assert bool(colours) != colourless, terminal.written


def test_without_a_terminal_each_minute_says_how_far_a_stage_is(record, monkeypatch):
    seconds = iter(range(0, 600, 30))
    monkeypatch.setattr(live, "time", SimpleNamespace(monotonic=lambda: next(seconds)))  # other threads keep theirs
    name = next(iter(record.stages))
    running = replace(record, stages={name: replace(record.stages[name], state="running")})
    stream = io.StringIO()
    view = PlainView(lambda: running, stream)
    feed = StageFeed(Path("nowhere"))
    feed.done, feed.total, feed.unit, feed.per_s, feed.eta_s = 120, 600, "steps", 4.1, 117.0
    feed.metrics = {"loss": 0.25, "real_tokens_per_s": 3400.0}
    view._feeds[name] = feed
    for _ in range(5):
        view.show(running)
    lines = [" ".join(line[9:].split()) for line in stream.getvalue().splitlines()]
    assert lines == [f"{name} 120/600 steps, 4.1/s, 1:57 left loss 0.25 real_tokens_per_s 3,400"] * 2
