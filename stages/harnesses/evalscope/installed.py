"""Where EvalScope is: an environment of its own, whose files alone are read here."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from functools import cache
from importlib.metadata import distributions
from pathlib import Path

from stages.core.errors import ResourceError
from stages.harnesses.evalscope.environment import PYTHON_VARIABLE, SIZE, is_made, place


@dataclass(frozen=True)
class InstalledEvalScope:
    """python: the interpreter that can import it. package: its folder."""

    python: Path
    package: Path
    version: str

    def benchmarks(self) -> list[str]:
        """Names of its own benchmarks."""
        return list(json.loads((self.package / "benchmarks" / "_index.json").read_bytes()))


def is_missing() -> bool:
    """Whether EvalScope is neither named nor installed, so that its environment is to be made."""
    return not os.environ.get(PYTHON_VARIABLE) and not is_made(place())


def find_evalscope() -> InstalledEvalScope:
    """By the interpreter that LIFECYCLE_EVALSCOPE names, or `.venv-evalscope` beside our environment.

    Raises ResourceError when there is none.
    """
    named = os.environ.get(PYTHON_VARIABLE)
    python = Path(named) if named else place() / "bin" / "python"
    if is_missing() or not os.access(python, os.X_OK):
        why = f"{python} is no program" if named else f"{place()} is not there, or was not made to its end"
        raise ResourceError(
            f"EvalScope was not found: {why}; create its environment with `make evalscope` ({SIZE}), or name its "
            f"interpreter in {PYTHON_VARIABLE}"
        )
    return _installed(python.absolute())


@cache
def _installed(python: Path) -> InstalledEvalScope:
    """By the package metadata: importing it takes many seconds."""
    for folder in sorted(python.parent.parent.glob("lib/python3*/site-packages")):
        for distribution in distributions(name="evalscope", path=[str(folder)]):
            return InstalledEvalScope(python, folder / "evalscope", distribution.version)
    raise ResourceError(f"{python} belongs to no environment with EvalScope; create it again with `make evalscope`")
