"""Text for terminals and logs: unsafe characters escaped, numbers with their nouns, lines with the time of day.

A text from outside (a row, a model's answer, a name on a hub) may hold control characters and marks of the writing
direction, which a terminal would obey, and hide or replace what stands beside them.
"""

import json
import os
import re
import time
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any, TextIO

UNSAFE = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")
"""Pattern of control characters (not tab, newline), writing directions and surrogates, which no terminal must get."""
LOG_VARIABLE = "LIFECYCLE_LOG"
INTERVAL_S = 10.0
"""Seconds between the lines that are printed while a server starts."""


def visible(text: str) -> str:
    """Return the text with each unsafe character replaced by its escape, such as `\\x1b`."""
    return UNSAFE.sub(lambda match: match[0].encode("unicode_escape").decode(), text)


def counted(number: int, noun: str) -> str:
    """Return a number with its noun: `1 document`, `2,000 documents`."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def print_line(text: str, stream: TextIO | None = None) -> None:
    """Print a line (default: to stdout) at once, in one write.

    `print` writes the end of a line apart: with PYTHONUNBUFFERED, or two threads, another may come between.
    """
    print(f"{text}\n", end="", file=stream, flush=True)


def say(text: str, stream: TextIO) -> None:
    """Print text at once, with unsafe characters escaped; in a log (no terminal) each line begins with the time.

    With LIFECYCLE_LOG=json the text is one line, a JSON object with time, process and message, also on a terminal.
    """
    text = visible(text)
    if logs_json():
        text = _as_json(text)
    elif not stream.isatty():
        now = time.strftime("%H:%M:%S")
        text = "\n".join(f"{now} {line}" for line in text.splitlines())
    print_line(text, stream)


def print_timed(message: str) -> None:
    """Print a line at once that begins with the time of day, also on a terminal."""
    print_line(_as_json(message) if logs_json() else f"{time.strftime('%H:%M:%S')} {message}")


def logs_json() -> bool:
    """Return whether LIFECYCLE_LOG asks for lines of JSON instead of lines that begin with the time."""
    return os.environ.get(LOG_VARIABLE) == "json"


def _as_json(message: str) -> str:
    now = datetime.now(UTC).isoformat(timespec="milliseconds")
    return json.dumps({"time": now, "pid": os.getpid(), "message": message}, ensure_ascii=False)


def starting_lines(title: str) -> Callable[[float], None]:
    """Return a function for `Server.wait_until_ready` that prints every 10 s how long a server has been starting."""
    reported_s = 0.0

    def report(elapsed_s: float) -> None:
        nonlocal reported_s
        if elapsed_s >= reported_s + INTERVAL_S:
            reported_s = elapsed_s
            print_timed(f"{title} is starting, {elapsed_s:.0f} s so far")

    return report


class VisibleStream:
    """Text stream that escapes unsafe characters in all text written to it before the raw stream gets the text."""

    def __init__(self, raw: TextIO) -> None:
        self.raw = raw

    def write(self, text: str) -> int:
        """Write a text with unsafe characters escaped; return the number of characters of the original text."""
        self.raw.write(visible(text))
        return len(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.raw, name)


def raw_stream(stream: Any) -> TextIO:
    """Return the unfiltered stream inside a `VisibleStream`, for progress bars, which need control characters."""
    found: TextIO = stream.raw if isinstance(stream, VisibleStream) else stream
    return found
