"""Finds the cause in the log of a server that is written in Python: the first exception that is not another's echo."""

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
    """What the parser of options says, else the first exception with its message, or where it has none, with the code
    that raised it; and the cure. None where neither is there.

    prefix: what the server puts before its lines. usage: the parser's line, whose group is what it says. generic:
    phrases, in lower case, of exceptions that are mere consequences of others. cures: what a cause says → what to
    change.
    """
    lines = [prefix.sub("", line).rstrip() for line in log.splitlines()]
    misused = (match.group(1) for match in map(usage.match, lines) if match)
    cause = next(chain(misused, _exceptions(lines, generic)), None)
    if cause is None:
        return None
    shown = shortened(" ".join(cause.split()), MAX_CHARACTERS)
    cure = next((cure for said, cure in cures.items() if said in cause), None)
    return f"{shown}: {cure}" if cure else shown


def _exceptions(lines: Sequence[str], generic: Collection[str]) -> Iterator[str]:
    for index, line in enumerate(lines):
        if EXCEPTION.match(line) and not any(phrase in line.lower() for phrase in generic):
            below = lines[index + 1 :]
            begins_below = line.endswith(":") and below and not below[0].startswith(" ")
            said = [line, *(below[:1] if begins_below else _continuation(below))]
            yield " ".join(said if ":" in line else [*said, "at:", *_failing_code(lines[:index])])


def _continuation(lines: Sequence[str]) -> Iterator[str]:
    """The rest of a message of several lines, as pydantic writes them: indented."""
    for line in lines[:MAX_CONTINUATION_LINES]:
        if not line.startswith(" ") or line.lstrip().startswith(("File ", "For further information")):
            return
        yield line.strip()


def _failing_code(lines: Sequence[str]) -> Iterator[str]:
    """The innermost place in the traceback that `lines` end with, and the code there, for exceptions without a word."""
    start = next((index for index in reversed(range(len(lines))) if lines[index].startswith('  File "')), len(lines))
    return (line.strip() for line in lines[start : start + 2])
