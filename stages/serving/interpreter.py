"""Python environments of other programs, such as serving engines: their interpreters, packages and error logs."""

import os
import re
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.metadata import PackageNotFoundError, distributions
from itertools import chain
from pathlib import Path
from types import MappingProxyType

from stages.core.errors import ResourceError
from stages.core.redaction import shortened

NOT_INHERITED = {
    *("PYTHONPATH", "VIRTUAL_ENV"),
    # Of a training process that starts a server: the server is no part of its group.
    *("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"),
}
EXCEPTION = re.compile(r"^(?:[A-Za-z_]\w*\.)*[A-Z]\w*(?:Error|Exception|Interrupt|Exit|Refused|NotFound)\b.*")
MAX_CONTINUATION_LINES = 5
MAX_CHARACTERS = 600


def inherited_environment() -> dict[str, str]:
    """Return our environment variables, without PYTHONPATH, RANK and the like, for a program of another environment."""
    return {name: value for name, value in os.environ.items() if name not in NOT_INHERITED}


def find_interpreter(package: str, *, title: str, variable: str, environment: str, how: str) -> tuple[Path, str]:
    """Return the Python interpreter of a package's environment, and the package's version.

    It is the one that `variable` names, or `ENVIRONMENT/bin/python` beside our environment. title: name of the program
    in messages. how: command that makes the environment. Raises ResourceError for none.
    """
    named = os.environ.get(variable)
    beside = Path(sys.prefix).parent / environment / "bin" / "python"
    command = Path(named).absolute() if named else beside
    if not os.access(command, os.X_OK):
        why = f"{variable} names {named}, which is no program" if named else f"{beside} does not exist"
        raise ResourceError(
            f"{title} was not found: {why}; make its environment with `{how}`, or set {variable} to the `python` of an "
            f"environment with the package {package}"
        )
    try:
        return command, find_package(command, package).version
    except PackageNotFoundError:
        raise ResourceError(
            f"{command} has no package {package} beside it; make its environment with `{how}`"
        ) from None


@dataclass(frozen=True)
class InstalledPackage:
    """Package in another Python environment: its version and the `site-packages` folder that holds it."""

    site_packages: Path
    version: str


@cache
def find_package(command: Path, package: str) -> InstalledPackage:
    """Find a package in a command's environment, by its metadata instead of a slow import.

    Raises PackageNotFoundError, which is not cached: the environment may still be made.
    """
    for folder in sorted(command.parent.parent.glob("lib/python3*/site-packages")):
        for distribution in distributions(name=package, path=[str(folder)]):
            return InstalledPackage(folder, distribution.version)
    raise PackageNotFoundError(package)


def root_cause(
    log: str,
    *,
    prefix: re.Pattern[str],
    usage: re.Pattern[str],
    generic: Collection[str],
    cures: Mapping[str, str] = MappingProxyType({}),
) -> str | None:
    """Return a failure's root cause from an engine's log, with a remedy if known; None if the log shows none.

    It is what the option parser says, else the first exception with its message, or else with the code that raised it.
    prefix: text that the server puts before its lines. usage: the parser's line, with what it says as group 1. generic:
    phrases, in lower case, of exceptions that only follow from others. cures: text of a cause → what to change.
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
    """Yield the indented lines of a log that continue a multi-line error message, such as pydantic's."""
    for line in lines[:MAX_CONTINUATION_LINES]:
        if not line.startswith(" ") or line.lstrip().startswith(("File ", "For further information")):
            return
        yield line.strip()


def _failing_code(lines: Sequence[str]) -> Iterator[str]:
    """Return the last frame (file, line, code) of the traceback at the end of `lines`, for errors without a message."""
    start = next((index for index in reversed(range(len(lines))) if lines[index].startswith('  File "')), len(lines))
    return (line.strip() for line in lines[start : start + 2])
