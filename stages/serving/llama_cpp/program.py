"""The llama.cpp program: where it is, and the command and environment of a server.

It lives in an environment of its own, as the wheel `xllamacpp`, and is never imported here.
"""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from functools import cache
from importlib.metadata import distributions
from pathlib import Path
from typing import TYPE_CHECKING

from stages.core.errors import ResourceError
from stages.models.gguf_file import GGUF_FILE
from stages.models.model_config import read_config
from stages.serving.launch import LaunchSpec

if TYPE_CHECKING:
    from stages.serving.proxy import EngineAddress  # its HTTP imports would slow every plan

SERVER = Path(__file__).with_name("server_program.py")
DEFAULT_SLOTS = 4
NOT_INHERITED = ("PYTHONPATH", "VIRTUAL_ENV")


@dataclass(frozen=True)
class LlamaCppProgram:
    """command: the interpreter of the wheel's environment. version: the wheel's."""

    command: Path
    version: str

    def server_command(self, spec: LaunchSpec, address: EngineAddress) -> list[str]:
        slots = spec.serving.max_num_seqs or DEFAULT_SLOTS
        context = spec.serving.max_model_len or int(read_config(spec.model)["max_position_embeddings"])
        command = [str(self.command), "-P", str(SERVER), str(spec.model / GGUF_FILE), "--alias", spec.own_name]
        command += ["--socket", str(address.socket), "--context", str(context), "--slots", str(slots)]
        return [*command, "--threads", str(free_cores())]

    def server_environment(self, spec: LaunchSpec, api_key: str) -> dict[str, str]:
        """Ours, without what would confuse another Python, with the key."""
        inherited = {name: value for name, value in os.environ.items() if name not in NOT_INHERITED}
        return {**inherited, "LLAMA_API_KEY": api_key, "PYTHONUNBUFFERED": "1"}


def free_cores() -> int:
    """Cores that nobody has used of late, at least one: threads beyond those spin at barriers, and an answer that takes
    6 ms on an idle core took 6 s with two threads on two busy ones."""
    most = int(os.environ.get("OMP_NUM_THREADS") or 0) or len(os.sched_getaffinity(0))
    return max(1, min(most, len(os.sched_getaffinity(0)) - round(os.getloadavg()[0])))


def find_llama_cpp() -> LlamaCppProgram:
    """The interpreter that LIFECYCLE_LLAMA_CPP names, or `.venv-llama-cpp/bin/python` beside our environment.

    Raises ResourceError when there is none, or it has no `xllamacpp`.
    """
    named = os.environ.get("LIFECYCLE_LLAMA_CPP")
    beside = Path(sys.prefix).parent / ".venv-llama-cpp" / "bin" / "python"
    command = Path(named).absolute() if named else beside
    if not os.access(command, os.X_OK):
        why = f"LIFECYCLE_LLAMA_CPP names {named}, which is no program" if named else f"{beside} does not exist"
        raise ResourceError(
            f"llama.cpp was not found: {why}; make its environment with `make llama-cpp`, or set LIFECYCLE_LLAMA_CPP "
            "to the `python` of an environment with the package xllamacpp"
        )
    return LlamaCppProgram(command, _read_version(command))


@cache
def _read_version(command: Path) -> str:
    """By the package metadata in the program's environment."""
    for folder in sorted(command.parent.parent.glob("lib/python3*/site-packages")):
        for distribution in distributions(name="xllamacpp", path=[str(folder)]):
            return distribution.version
    raise ResourceError(f"{command} has no package xllamacpp beside it; make its environment with `make llama-cpp`")
