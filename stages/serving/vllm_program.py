"""The vLLM program: where it is, and which build it is.

vLLM lives in an environment of its own and is never imported here: it is started as a program and spoken to over HTTP.
"""

from __future__ import annotations

import os
import shutil
import sys
from dataclasses import dataclass
from functools import cache
from importlib.metadata import distributions
from pathlib import Path

from stages.core.errors import ResourceError


@dataclass(frozen=True)
class VllmProgram:
    """An installed vLLM: its `vllm` command, the interpreter beside it, and its version."""

    command: Path
    python: Path
    version: str

    @property
    def runs_on_cpu(self) -> bool:
        """Whether this is a build for CPUs; it serves there even when the machine has a GPU."""
        return "cpu" in self.version


def find_vllm() -> VllmProgram:
    """The program that LIFECYCLE_VLLM names, or `.venv-serve/bin/vllm` beside our environment, or that on PATH.

    Raises ResourceError when there is none.
    """
    command = _find_command()
    python = command.with_name("python")
    if not python.exists():
        raise ResourceError(f"{command} has no `python` beside it; expected vLLM in a virtual environment of its own")
    return VllmProgram(command, python, _read_version(command))


def _find_command() -> Path:
    named = os.environ.get("LIFECYCLE_VLLM")
    beside = Path(sys.prefix).parent / ".venv-serve" / "bin" / "vllm"
    on_path = shutil.which("vllm")
    if named and not os.access(named, os.X_OK):
        raise ResourceError(f"LIFECYCLE_VLLM names {named}, which is no program; point it at the `vllm` command")
    if named:
        return Path(named).absolute()
    if os.access(beside, os.X_OK):
        return beside
    if on_path:
        return Path(on_path).resolve()
    raise ResourceError(
        f"vLLM was not found: LIFECYCLE_VLLM is not set, {beside} does not exist, and there is no `vllm` on PATH; "
        "create the serve environment with `make environments`, or set LIFECYCLE_VLLM"
    )


@cache
def _read_version(command: Path) -> str:
    """Version by the package metadata in the program's environment: importing vLLM would cost seconds."""
    for folder in sorted(command.parent.parent.glob("lib/python3*/site-packages")):
        for distribution in distributions(name="vllm", path=[str(folder)]):
            return distribution.version
    raise ResourceError(
        f"{command} belongs to no environment with vLLM's package metadata; create the serve environment again"
    )
