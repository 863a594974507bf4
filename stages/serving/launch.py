"""What it takes to start a vLLM server: the launch spec, and the command and environment that it gives."""

from __future__ import annotations

import os
from pathlib import Path

from stages.core.contract import StrictModel
from stages.serving.config import ServingConfig
from stages.serving.vllm_program import VllmProgram

BYTES_PER_GIB = 2**30
CPU_KV_CACHE_GIB = 4.0
"""vLLM would take 92% of the host's memory, and refuse to start when something else uses more than the rest."""
QUIET = {
    "DO_NOT_TRACK": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "PYTHONUNBUFFERED": "1",
}


class LaunchSpec(StrictModel):
    """What it takes to start the same server again (`launch.json`)."""

    model: Path
    served_name: str
    serving: ServingConfig
    vllm_version: str


def server_command(program: VllmProgram, spec: LaunchSpec, host: str, port: int) -> list[str]:
    """The command line of the server. The API key is not in it: it travels in the environment."""
    serving = spec.serving
    command = [str(program.command), "serve", str(spec.model), "--served-model-name", spec.served_name]
    command += ["--host", host, "--port", str(port), "--dtype", serving.dtype]
    command += ["--tensor-parallel-size", str(serving.tensor_parallel_size)]
    if serving.max_model_len:
        command += ["--max-model-len", str(serving.max_model_len)]
    if serving.max_num_seqs:
        command += ["--max-num-seqs", str(serving.max_num_seqs)]
    kv_cache_gib = serving.kv_cache_memory_gib or (CPU_KV_CACHE_GIB if program.runs_on_cpu else None)
    if kv_cache_gib:
        command += ["--kv-cache-memory-bytes", str(int(kv_cache_gib * BYTES_PER_GIB))]
    if serving.enforce_eager:
        command += ["--enforce-eager"]
    if serving.trust_remote_code:
        command += ["--trust-remote-code"]
    if _runs_in_one_worker(program, serving):
        command += ["--distributed-executor-backend", "uni"]
    return command


def server_environment(program: VllmProgram, serving: ServingConfig, api_key: str) -> dict[str, str]:
    """The environment of the server: ours, without what would confuse vLLM, with the key and the CPU's settings."""
    inherited = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
    environment = {**inherited, **QUIET, "VLLM_API_KEY": api_key}
    if program.runs_on_cpu:
        environment.setdefault("OMP_NUM_THREADS", str(len(os.sched_getaffinity(0))))
        # Threads that spin while they wait make a server ten times slower on cores that others use too.
        environment.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    if _runs_in_one_worker(program, serving):
        environment["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    if program.runs_on_cpu and serving.enforce_eager:
        # Without this, the first request for log-probabilities compiles for 17 s in spite of --enforce-eager.
        environment["TORCHDYNAMO_DISABLE"] = "1"
    return environment


def _runs_in_one_worker(program: VllmProgram, serving: ServingConfig) -> bool:
    """On a CPU a single worker can live in the engine's process, which saves the import of another one."""
    return program.runs_on_cpu and serving.tensor_parallel_size == 1
