"""Interpreters of engines: each package lives in an environment of its own, whose Python runs its programs."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from functools import cache
from importlib.metadata import PackageNotFoundError, distributions
from pathlib import Path

from stages.core.errors import ResourceError

NOT_INHERITED = {
    *("PYTHONPATH", "VIRTUAL_ENV"),
    # Of a training process that starts a server: the server is no part of its group.
    *("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"),
}


def inherited_environment() -> dict[str, str]:
    """Return our environment variables without those that would confuse another Python's program."""
    return {name: value for name, value in os.environ.items() if name not in NOT_INHERITED}


def find_interpreter(package: str, *, title: str, variable: str, environment: str, how: str) -> tuple[Path, str]:
    """Return the interpreter that has a package, with the package's version.

    It is the one that `variable` names, or `ENVIRONMENT/bin/python` beside our environment.

    title: name of the program in messages.
    how: command that makes the environment.

    Raises ResourceError if there is no interpreter, or it has no such package.
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
    """A package of another environment. site_packages: folder that it lies in."""

    site_packages: Path
    version: str


@cache
def find_package(command: Path, package: str) -> InstalledPackage:
    """Find a package by the metadata in the environment of `command`: importing it could cost seconds.

    Raises PackageNotFoundError, which is not cached: the environment may still be made.
    """
    for folder in sorted(command.parent.parent.glob("lib/python3*/site-packages")):
        for distribution in distributions(name=package, path=[str(folder)]):
            return InstalledPackage(folder, distribution.version)
    raise PackageNotFoundError(package)
