"""Control characters in texts from outside are shown, not executed, by a terminal."""

import io
import json
import os
import subprocess
import sys
import time
from datetime import datetime

import pytest

from stages.core.lines import VisibleStream, print_timed, raw_stream, say, visible


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("red \x1b[31m", r"red \x1b[31m"),
        ("\u202eevil\u2066", r"\u202eevil\u2066"),
        ("bell\x07 back\x08 return\r", r"bell\x07 back\x08 return\x0d".replace("x0d", "r")),
        ("half \ud83d", r"half \ud83d"),
        ("tab\tand\nlines, żółć, 漢字, 👩‍👩‍👧", "tab\tand\nlines, żółć, 漢字, 👩‍👩‍👧"),
    ],
)
def test_only_what_a_terminal_would_obey_is_escaped(text, shown):
    assert visible(text) == shown
    written = io.StringIO()
    VisibleStream(written).write(text)
    assert written.getvalue() == shown
    said = io.StringIO()
    say(text, said)
    assert [line[9:] for line in said.getvalue().splitlines()] == shown.splitlines()


def test_a_program_that_draws_gets_the_stream_itself():
    stream = io.StringIO()
    assert raw_stream(VisibleStream(stream)) is raw_stream(stream) is stream


def test_lines_of_two_processes_on_one_unbuffered_stdout_stay_whole():
    """A supervisor and its child share a stdout; with `python -u` each write of theirs goes out by itself."""
    program = (
        "import os\n"
        "from stages.core.lines import print_line\n"
        "child = os.fork()\n"
        "for number in range(4000):\n"
        "    print_line(('parent' if child else 'child') + f' {number}')\n"
        "child and os.wait()\n"
    )
    command = [sys.executable, "-u", "-c", program]
    written = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout.splitlines()
    for name in ("parent", "child"):
        assert [line for line in written if line.startswith(name)] == [f"{name} {number}" for number in range(4000)]
    assert len(written) == 8000


def test_a_log_in_json_has_one_object_a_line(monkeypatch, capsys):
    monkeypatch.setenv("LIFECYCLE_LOG", "json")
    say("first\nsecond \x1b", sys.stdout)
    print_timed("über")
    first, second = map(json.loads, capsys.readouterr().out.splitlines())
    assert (first["message"], second["message"]) == ("first\nsecond \\x1b", "über")
    assert first["pid"] == os.getpid()
    assert abs(time.time() - datetime.fromisoformat(first["time"]).timestamp()) < 60
