"""The vLLM program: where it is, which build it is, and the command and environment of a server.

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
from typing import TYPE_CHECKING

from stages.core.errors import ResourceError
from stages.serving.config import MOST_STOP_TEXTS, ServingConfig
from stages.serving.interpreter import inherited_environment
from stages.serving.launch import LaunchSpec
from stages.serving.vllm.adapters import adapter_arguments
from stages.serving.vllm.arguments import written
from stages.serving.vllm.tool_parsers import parser_of

if TYPE_CHECKING:
    from stages.serving.backend import EngineAddress  # its HTTP imports would slow every plan

BYTES_PER_GIB = 2**30
CPU_KV_CACHE_GIB = 4.0
"""vLLM would take 92% of the host's memory, and refuse to start when something else uses more than the rest."""
GPU_SHARE = 0.9
"""Part of a GPU's memory that servers beside each other take."""
QUIET = {
    "DO_NOT_TRACK": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "PYTHONUNBUFFERED": "1",
}
SETTINGS = {
    **QUIET,
    # By itself it takes 4, and answers 400 to tasks of lm-eval that have more, the end token among them.
    "VLLM_MAX_STOP_STRINGS": str(MOST_STOP_TEXTS),
}

LOOPBACK = {"VLLM_HOST_IP": "127.0.0.1", "GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"}
"""Where the processes of a server, all on one machine, reach one another."""


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

    def server_command(self, spec: LaunchSpec, address: EngineAddress) -> list[str]:
        serving = spec.serving
        command = [str(self.command), "serve", str(spec.model), "--served-model-name", spec.own_name]
        command += ["--uds", str(address.socket), "--dtype", serving.dtype]
        command += ["--tensor-parallel-size", str(serving.tensor_parallel_size)]
        kv_cache_gib = serving.kv_cache_memory_gib or (CPU_KV_CACHE_GIB if self.runs_on_cpu else None)
        sizes = {
            "--max-model-len": serving.max_model_len,
            "--max-num-seqs": serving.max_num_seqs,
            "--kv-cache-memory-bytes": kv_cache_gib and int(kv_cache_gib * BYTES_PER_GIB),
        }
        command += [part for name, size in sizes.items() if size for part in (name, str(size))]
        if self._is_eager(spec):
            command += ["--enforce-eager"]
        if serving.trust_remote_code:
            command += ["--trust-remote-code"]
        if spec.adapters:
            command += adapter_arguments(spec)
        if spec.num_tried > 1 and not self.runs_on_cpu:
            # By itself each would take 92% of a GPU's memory.
            command += ["--gpu-memory-utilization", f"{GPU_SHARE / spec.num_tried:.2f}"]
        if parser := serving.tool_call_parser or parser_of(spec.model, self.python):
            command += ["--enable-auto-tool-choice", "--tool-call-parser", parser]
        command += [part for parts in written(serving.arguments).values() for part in parts]
        if spec.for_training:
            # What a model's own generation_config.json says of sampling, nobody asked for; log-probabilities are those
            # of what was sampled from, temperature included.
            command += ["--generation-config", "vllm", "--logprobs-mode", "processed_logprobs"]
        if self._runs_in_one_worker(serving):
            command += ["--distributed-executor-backend", "uni"]
        return command

    def server_environment(self, spec: LaunchSpec, api_key: str) -> dict[str, str]:
        """Ours, without what would confuse vLLM, with the key and the CPU's settings."""
        serving = spec.serving
        # Sockets get names relative to the working folder, since their paths may not be longer than 107 bytes.
        environment = {**inherited_environment(), **SETTINGS, "VLLM_API_KEY": api_key, "VLLM_RPC_BASE_PATH": "."}
        for variable, value in LOOPBACK.items():
            environment.setdefault(variable, value)
        if self.runs_on_cpu:
            environment.setdefault("OMP_NUM_THREADS", str(len(os.sched_getaffinity(0))))
            # Threads that spin while they wait make a server ten times slower on cores that others use too.
            environment.setdefault("OMP_WAIT_POLICY", "PASSIVE")
        # Its routes would let anybody with the key read folders as adapters; the proxy passes none of them on.
        environment["VLLM_ALLOW_RUNTIME_LORA_UPDATING"] = str(int(spec.swaps_adapters))
        # The routes that load other weights run any method of a worker; the proxy passes none of them on, either.
        environment["VLLM_SERVER_DEV_MODE"] = str(int(spec.for_training))
        if self._runs_in_one_worker(serving):
            environment["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
        if self.runs_on_cpu and self._is_eager(spec):
            # Without this, the first request for log-probabilities compiles for 17 s in spite of --enforce-eager.
            environment["TORCHDYNAMO_DISABLE"] = "1"
        return environment

    def _is_eager(self, spec: LaunchSpec) -> bool:
        """Return whether nothing is compiled: on a CPU that takes minutes, which a person who tries a model spends
        waiting for its first answer.
        """
        return spec.serving.enforce_eager or (spec.num_tried > 0 and self.runs_on_cpu)

    def _runs_in_one_worker(self, serving: ServingConfig) -> bool:
        """On a CPU a single worker can live in the engine's process, which saves the import of another one."""
        return self.runs_on_cpu and serving.tensor_parallel_size == 1


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
