"""Finds in vLLM's log why the server did not start.

The last line is of no help (`RuntimeError: Engine core initialization failed. See root cause above`): several processes
write into one log, each prefixes its lines, and the first traceback is the one that says what happened.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterator

PREFIX = re.compile(r"^\(\w+[^)]*pid=\d+\)\s*")
LEVEL = re.compile(r"^(ERROR|CRITICAL)\s+\d\d-\d\d \d\d:\d\d:\d\d \[[^\]]*\]\s?")
EXCEPTION = re.compile(r"^(?:[A-Za-z_]\w*\.)*[A-Z]\w*(?:Error|Exception|Interrupt|Exit|Refused|NotFound)\b.*")
USAGE = re.compile(r"^(?:vllm|vllm serve|api_server\.py)\S*: error: (.+)")
GENERIC = (
    "engine core initialization failed",
    "enginecore encountered an issue",
    "see root cause above",
    "see stack trace for root cause",
    "cancellederror",
    "systemexit",
    "keyboardinterrupt",
)
MAX_CONTINUATION_LINES = 5
MAX_CHARACTERS = 600


def find_root_cause(log: str) -> str | None:
    """The first exception in `log` that is not a mere consequence of another, with its message; None without one."""
    lines = [LEVEL.sub("", PREFIX.sub("", line)).rstrip() for line in log.splitlines()]
    usage = next((match.group(1) for match in map(USAGE.match, lines) if match), None)
    cause = usage or next(_exceptions(lines), None)
    return cause and textwrap.shorten(cause, MAX_CHARACTERS, placeholder=" …")


def _exceptions(lines: list[str]) -> Iterator[str]:
    """Exception lines, each with the lines that its message goes on over, the generic ones left out."""
    for index, line in enumerate(lines):
        if EXCEPTION.match(line) and not any(phrase in line.lower() for phrase in GENERIC):
            said = [line, *_continuation(lines[index + 1 :])]
            yield " ".join(said if ":" in line else [*said, "at:", *_failing_code(lines[:index])])


def _continuation(lines: list[str]) -> Iterator[str]:
    """The rest of a message of several lines, as pydantic writes them: indented."""
    for line in lines[:MAX_CONTINUATION_LINES]:
        if not line.startswith(" ") or line.lstrip().startswith(("File ", "For further information")):
            return
        yield line.strip()


def _failing_code(lines: list[str]) -> Iterator[str]:
    """The innermost place in the traceback that `lines` end with, and the code there, for exceptions without a word."""
    start = next((index for index in reversed(range(len(lines))) if lines[index].startswith('  File "')), len(lines))
    return (line.strip() for line in lines[start : start + 2])
