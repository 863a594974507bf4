"""The LMDeploy program: where it is, and the command and environment of a server.

It lives in an environment of its own, as the package `lmdeploy`, and is never imported here. The options are those of
LMDeploy 0.18.0, whose parser takes them; no server of it was ever run here.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from stages.core.errors import ModelError
from stages.models.model_config import max_positions, read_config
from stages.serving.half_precision import dtype_of
from stages.serving.interpreter import find_interpreter, inherited_environment
from stages.serving.launch import LaunchSpec
from stages.serving.lmdeploy.arguments import PASSED

if TYPE_CHECKING:
    from stages.serving.backend import EngineAddress  # its HTTP imports would slow every plan

SERVER = Path(__file__).with_name("server_program.py")
SETTINGS = {
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "PYTHONUNBUFFERED": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
    "UVICORN_LOG_LEVEL": "warning",
}


@dataclass(frozen=True)
class LmdeployProgram:
    """command: the interpreter of the package's environment. version: the package's."""

    command: Path
    version: str

    def server_command(self, spec: LaunchSpec, address: EngineAddress) -> list[str]:
        serving = spec.serving
        command = [str(self.command), "-P", str(SERVER), str(spec.model), "--model-name", spec.own_name]
        command += ["--server-name", "127.0.0.1", "--server-port", str(address.port), "--disable-fastapi-docs"]
        command += ["--dtype", dtype_of(spec), "--tp", str(serving.tensor_parallel_size)]
        # Of the PyTorch backend, which without it refuses to tell any log-probability.
        command += ["--logprobs-mode", "raw_logprobs"]
        # Always said: no answer of its server tells what it took by itself.
        command += ["--session-len", str(context_tokens(spec))]
        if serving.max_num_seqs:
            command += ["--max-batch-size", str(serving.max_num_seqs)]
        if serving.tool_call_parser:
            command += ["--tool-call-parser", serving.tool_call_parser]
        if serving.enforce_eager:
            command += ["--eager-mode"]
        if serving.trust_remote_code:
            command += ["--trust-remote-code"]
        return [*command, *(part for parts in PASSED.written(serving.arguments).values() for part in parts)]

    def server_environment(self, spec: LaunchSpec, api_key: str) -> dict[str, str]:
        return {**inherited_environment(), **SETTINGS, "LMDEPLOY_SERVER_KEY": api_key}


def context_tokens(spec: LaunchSpec) -> int:
    """Tokens that a prompt and its answer may have together. Raises ModelError where nothing says."""
    found = spec.serving.max_model_len or max_positions(read_config(spec.model))
    if found is None:
        raise ModelError(
            f"serving {spec.model} with LMDeploy: its config.json has no max_position_embeddings; say how many tokens "
            "a prompt and its answer may have (`serving.max_model_len`)"
        )
    return found


def find_lmdeploy() -> LmdeployProgram:
    """The interpreter that LIFECYCLE_LMDEPLOY names, or `.venv-lmdeploy/bin/python` beside our environment.

    Raises ResourceError when there is none, or it has no `lmdeploy`.
    """
    return LmdeployProgram(
        *find_interpreter(
            "lmdeploy",
            title="LMDeploy",
            variable="LIFECYCLE_LMDEPLOY",
            environment=".venv-lmdeploy",
            how="python -m venv .venv-lmdeploy && .venv-lmdeploy/bin/pip install lmdeploy",
        )
    )
