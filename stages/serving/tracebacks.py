"""Root causes in the logs of Python servers: the first exception that is not a consequence of another."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import chain
from types import MappingProxyType

from stages.core.redaction import shortened

EXCEPTION = re.compile(r"^(?:[A-Za-z_]\w*\.)*[A-Z]\w*(?:Error|Exception|Interrupt|Exit|Refused|NotFound)\b.*")
MAX_CONTINUATION_LINES = 5
MAX_CHARACTERS = 600


def root_cause(
    log: str,
    *,
    prefix: re.Pattern[str],
    usage: re.Pattern[str],
    generic: Collection[str],
    cures: Mapping[str, str] = MappingProxyType({}),
) -> str | None:
    """Return the cause in a log, with a cure where one is known; None without a cause.

    It is what the option parser says, else the first exception with its message, or, where it has none, with the code
    that raised it.

    prefix: text that the server puts before its lines.
    usage: the parser's line, with what it says as group 1.
    generic: phrases, in lower case, of exceptions that only follow from others.
    cures: text of a cause → what to change.
    """
    lines = [prefix.sub("", line).rstrip() for line in log.splitlines()]
    misused = (match.group(1) for match in map(usage.match, lines) if match)
    cause = next(chain(misused, _exceptions(lines, generic)), None)
    if cause is None:
        return None
    shown = shortened(" ".join(cause.split()), MAX_CHARACTERS)
    cure = next((cure for phrase, cure in cures.items() if phrase in cause), None)
    return f"{shown}: {cure}" if cure else shown


def _exceptions(lines: Sequence[str], generic: Collection[str]) -> Iterator[str]:
    for index, line in enumerate(lines):
        if EXCEPTION.match(line) and not any(phrase in line.lower() for phrase in generic):
            below = lines[index + 1 :]
            begins_below = line.endswith(":") and below and not below[0].startswith(" ")
            message = [line, *(below[:1] if begins_below else _continuation(below))]
            yield " ".join(message if ":" in line else [*message, "at:", *_failing_code(lines[:index])])


def _continuation(lines: Sequence[str]) -> Iterator[str]:
    """Yield the further lines of a message of several lines, which pydantic indents."""
    for line in lines[:MAX_CONTINUATION_LINES]:
        if not line.startswith(" ") or line.lstrip().startswith(("File ", "For further information")):
            return
        yield line.strip()


def _failing_code(lines: Sequence[str]) -> Iterator[str]:
    """Return the innermost place of the traceback that ends `lines`, and its code, for errors without a message."""
    start = next((index for index in reversed(range(len(lines))) if lines[index].startswith('  File "')), len(lines))
    return (line.strip() for line in lines[start : start + 2])
