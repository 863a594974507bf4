"""The SGLang program: where it is, and the command and environment of a server.

It lives in an environment of its own, as the package `sglang`, and is never imported here. The options are those of
SGLang 0.5.23, whose parser takes them; no server of it was ever run here.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from stages.serving.half_precision import dtype_of
from stages.serving.interpreter import find_interpreter, inherited_environment
from stages.serving.launch import LaunchSpec
from stages.serving.sglang.arguments import PASSED

if TYPE_CHECKING:
    from stages.serving.backend import EngineAddress  # its HTTP imports would slow every plan

SERVER = Path(__file__).with_name("server_program.py")
SETTINGS = {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "PYTHONUNBUFFERED": "1"}
NO_GRAPHS = ("--cuda-graph-backend-decode=disabled", "--cuda-graph-backend-prefill=disabled")


@dataclass(frozen=True)
class SglangProgram:
    """command: the interpreter of the package's environment. version: the package's."""

    command: Path
    version: str

    def server_command(self, spec: LaunchSpec, address: EngineAddress) -> list[str]:
        serving = spec.serving
        command = [str(self.command), "-P", str(SERVER), "--model-path", str(spec.model)]
        command += ["--served-model-name", spec.own_name, "--host", "127.0.0.1", "--port", str(address.port)]
        command += ["--dtype", dtype_of(spec), "--tp-size", str(serving.tensor_parallel_size), "--enable-metrics"]
        command += ["--load-format", "safetensors"]
        # At its usual level it logs all of its settings, the key among them.
        command += ["--log-level", "warning"]
        if serving.max_model_len:
            command += ["--context-length", str(serving.max_model_len)]
        if serving.max_num_seqs:
            command += ["--max-running-requests", str(serving.max_num_seqs)]
        if serving.tool_call_parser:
            command += ["--tool-call-parser", serving.tool_call_parser]
        if serving.enforce_eager:
            command += NO_GRAPHS
        if serving.trust_remote_code:
            command += ["--trust-remote-code"]
        return [*command, *(part for parts in PASSED.written(serving.arguments).values() for part in parts)]

    def server_environment(self, spec: LaunchSpec, api_key: str) -> dict[str, str]:
        return {**inherited_environment(), **SETTINGS, "SGLANG_SERVER_KEY": api_key}


def find_sglang() -> SglangProgram:
    """The interpreter that LIFECYCLE_SGLANG names, or `.venv-sglang/bin/python` beside our environment.

    Raises ResourceError when there is none, or it has no `sglang`.
    """
    return SglangProgram(
        *find_interpreter(
            "sglang",
            title="SGLang",
            variable="LIFECYCLE_SGLANG",
            environment=".venv-sglang",
            how="python -m venv .venv-sglang && .venv-sglang/bin/pip install sglang",
        )
    )
