"""The llama.cpp program: where it is, and the command and environment of a server.

It lives in an environment of its own, as the wheel `xllamacpp`, and is never imported here.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from stages.models.gguf_file import GGUF_FILE
from stages.models.model_config import read_config
from stages.serving.interpreter import find_interpreter, inherited_environment
from stages.serving.launch import LaunchSpec

if TYPE_CHECKING:
    from stages.serving.backend import EngineAddress  # its HTTP imports would slow every plan

SERVER = Path(__file__).with_name("server_program.py")
DEFAULT_SLOTS = 4


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
        return {**inherited_environment(), "LLAMA_API_KEY": api_key, "PYTHONUNBUFFERED": "1"}


def free_cores() -> int:
    """Cores that nobody has used of late, at least one: threads beyond those spin at barriers, and an answer that takes
    6 ms on an idle core took 6 s with two threads on two busy ones."""
    most = int(os.environ.get("OMP_NUM_THREADS") or 0) or len(os.sched_getaffinity(0))
    return max(1, min(most, len(os.sched_getaffinity(0)) - round(os.getloadavg()[0])))


def find_llama_cpp() -> LlamaCppProgram:
    """The interpreter that LIFECYCLE_LLAMA_CPP names, or `.venv-llama-cpp/bin/python` beside our environment.

    Raises ResourceError when there is none, or it has no `xllamacpp`.
    """
    return LlamaCppProgram(
        *find_interpreter(
            "xllamacpp",
            title="llama.cpp",
            variable="LIFECYCLE_LLAMA_CPP",
            environment=".venv-llama-cpp",
            how="make llama-cpp",
        )
    )
