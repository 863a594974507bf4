"""Where EvalScope is: an environment of its own, whose files alone are read here."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import dataclass
from functools import cache
from importlib.metadata import distributions
from pathlib import Path

from stages.core.errors import ResourceError

PYTHON_VARIABLE = "LIFECYCLE_EVALSCOPE"


@dataclass(frozen=True)
class InstalledEvalScope:
    """python: the interpreter that can import it. package: its folder."""

    python: Path
    package: Path
    version: str

    def benchmarks(self) -> list[str]:
        """Names of its own benchmarks."""
        return list(json.loads((self.package / "benchmarks" / "_index.json").read_bytes()))


def find_evalscope() -> InstalledEvalScope:
    """By the interpreter that LIFECYCLE_EVALSCOPE names, or `.venv-evalscope` beside our environment.

    Raises ResourceError when there is none.
    """
    named = os.environ.get(PYTHON_VARIABLE)
    python = Path(named) if named else Path(sys.prefix).parent / ".venv-evalscope" / "bin" / "python"
    if not os.access(python, os.X_OK):
        raise ResourceError(
            f"EvalScope was not found: {python} is no program; create its environment with `make evalscope` (800 MB), "
            f"or name its interpreter in {PYTHON_VARIABLE}"
        )
    return _installed(python.absolute())


@cache
def _installed(python: Path) -> InstalledEvalScope:
    """By the package metadata: importing it takes many seconds."""
    for folder in sorted(python.parent.parent.glob("lib/python3*/site-packages")):
        for distribution in distributions(name="evalscope", path=[str(folder)]):
            return InstalledEvalScope(python, folder / "evalscope", distribution.version)
    raise ResourceError(f"{python} belongs to no environment with EvalScope; create it again with `make evalscope`")
