"""vLLM as a serving engine: its program, its server's command line and environment, its log, its load generator.

It lives in an environment of its own and is never imported here, but spoken to over HTTP.
"""

from __future__ import annotations

import json
import math
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import JsonValue

from stages.core.errors import ResourceError, ServerError
from stages.core.shipped import install_command
from stages.core.supervised import was_killed
from stages.models.facts import CONFIG_FILE, ModelFacts
from stages.models.linear_layers import Projection
from stages.models.media import MAX_PIXELS
from stages.models.recorded import Predicted
from stages.serving.config import MOST_STOP_TEXTS, BenchmarkConfig, ServingConfig
from stages.serving.engine import (
    Capabilities,
    LaunchSpec,
    LoadResult,
    Quantization,
    SeenDocument,
    SleepingPart,
    UncheckedOptions,
    WeightConnection,
)
from stages.serving.interpreter import find_package, inherited_environment, root_cause
from stages.serving.vllm import servability
from stages.serving.vllm.adapters import adapted_kinds, adapter_arguments, check_adapters, has_room
from stages.serving.vllm.arguments import argument_problems, media_arguments, speculation_arguments, written
from stages.serving.vllm.prompt_steps import whole_prompts
from stages.serving.vllm.tool_parsers import parser_of
from stages.serving.vllm.transfers.registry import TRANSFERS, chosen, transfer_arguments
from stages.serving.vllm.transfers.transfer import WeightRoutes

if TYPE_CHECKING:  # their HTTP imports would slow every plan
    from stages.remote.http import Answer
    from stages.serving.backend import EngineAddress
    from stages.serving.client import Choice, Choices, Client


BYTES_PER_GIB = 2**30
CPU_KV_CACHE_GIB = 4.0
"""Size of the KV cache on a CPU in GiB, where the recipe gives none.

vLLM would take 92% of the host's memory, and refuse to start when something else uses more than the rest."""
GPU_SHARE = 0.9
"""Share of a GPU's memory for all servers that a user starts together for a trial."""
QUIET = {
    "DO_NOT_TRACK": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "PYTHONUNBUFFERED": "1",
}
"""Environment variables that keep vLLM and its libraries from sending usage reports and from contacting model hubs."""
SETTINGS = {
    **QUIET,
    # vLLM's default is 4, and it answers 400 to tasks of lm-eval that have more, the end token among them.
    "VLLM_MAX_STOP_STRINGS": str(MOST_STOP_TEXTS),
}

LOOPBACK = {"VLLM_HOST_IP": "127.0.0.1", "GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"}
"""Environment variables by which a server's processes communicate over the loopback interface only."""


SMOKE_PROMPT = "1 + 1 = 2"
"""Prompt of the request that checks a new server; it must have more than one token.

On CPUs with AMX, vLLM 0.32's attention in bf16 dies by SIGILL until a product of two matrices, which a single token
does not need, has asked the kernel for the tile registers."""
SMOKE_TOKENS = 2


FORKING = Path(__file__).with_name("forking_program.py")
LOAD_GENERATOR = Path(__file__).with_name("load_generator.py")
LOAD_TIMEOUT_S = 3600.0


PREFIX = re.compile(r"^(?:\(\w+[^)]*pid=\d+\)\s*)?(?:(?:ERROR|CRITICAL)\s+\d\d-\d\d \d\d:\d\d:\d\d \[[^\]]*\]\s?)?")
"""Pattern of the prefix of vLLM's log lines: process, level, time and module."""
USAGE = re.compile(r"^(?:vllm|vllm serve|api_server\.py)\S*: error: (.+)")
GENERIC = (
    "engine core initialization failed",
    "enginecore encountered an issue",
    "see root cause above",
    "see stack trace for root cause",
    "cancellederror",
    "systemexit",
    "keyboardinterrupt",
)


@dataclass(frozen=True)
class VllmProgram:
    """Installed vLLM: its `vllm` command, its Python interpreter, and its version."""

    command: Path
    python: Path
    version: str

    @property
    def runs_on_cpu(self) -> bool:
        """Return whether the installed vLLM is a build for CPUs, which uses no GPU even where there is one."""
        return "cpu" in self.version

    def server_command(self, spec: LaunchSpec, address: EngineAddress) -> list[str]:
        serving = spec.serving
        command = [str(self.command)]
        # Not in an image, whose command has no path: our files are not there.
        if self._runs_in_one_worker(spec) and self._is_eager(spec) and self.command.is_absolute():
            command = [str(self.python), "-P", str(FORKING)]
        command += ["serve", str(spec.model), "--served-model-name", spec.own_name]
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
        if self.runs_on_cpu:
            # Commands are also made for models that are not on this machine.
            facts = spec.facts if (spec.model / CONFIG_FILE).is_file() else ModelFacts({})
            command += whole_prompts(facts, serving)
        else:
            # By default each server would take 92% of a GPU's memory.
            share = GPU_SHARE / spec.num_tried if spec.num_tried > 1 else spec.gpu_share
            command += ["--gpu-memory-utilization", f"{share:.2f}"] if share else []
            command += ["--enable-sleep-mode"] if spec.sleeps else []
        if spec.data_parallel_size > 1:
            # One API server: by default there are as many as copies, and only one of them would know a loaded adapter.
            command += ["--data-parallel-size", str(spec.data_parallel_size), "--api-server-count", "1"]
        command += speculation_arguments(spec.speculation)
        if parser := serving.tool_call_parser or parser_of(spec.model, self.python):
            command += ["--enable-auto-tool-choice", "--tool-call-parser", parser]
        command += media_arguments(spec)
        command += [part for parts in written(serving.arguments).values() for part in parts]
        if spec.for_training:
            # Ignore the sampling settings in the model's generation_config.json, and return log-probabilities of the
            # distribution that was sampled from, temperature included.
            command += ["--generation-config", "vllm", "--logprobs-mode", "processed_logprobs"]
        command += transfer_arguments(spec)
        if self._runs_in_one_worker(spec):
            command += ["--distributed-executor-backend", "uni"]
        return command

    def server_environment(self, spec: LaunchSpec, api_key: str) -> dict[str, str]:
        """Return our environment with the API key, settings for CPUs, and no variables that would confuse vLLM."""
        # Sockets get names relative to the working folder, since their paths may not be longer than 107 bytes.
        environment = {**inherited_environment(), **SETTINGS, "VLLM_API_KEY": api_key, "VLLM_RPC_BASE_PATH": "."}
        for variable, value in LOOPBACK.items():
            environment.setdefault(variable, value)
        if self.runs_on_cpu:
            environment.setdefault("OMP_NUM_THREADS", str(len(os.sched_getaffinity(0))))
            # Threads that spin while they wait make a server ten times slower on cores that others use too.
            environment.setdefault("OMP_WAIT_POLICY", "PASSIVE")
        # These routes would let everyone with the key read folders as adapters; the proxy passes none of them on.
        environment["VLLM_ALLOW_RUNTIME_LORA_UPDATING"] = str(int(spec.swaps_adapters))
        # The routes that load other weights run any method of a worker; the proxy passes none of them on, either.
        environment["VLLM_SERVER_DEV_MODE"] = str(int(spec.for_training))
        # With it, requests could bring pickles, which run any code.
        environment["VLLM_ALLOW_INSECURE_SERIALIZATION"] = "0"
        if spec.max_images:
            environment |= {"VLLM_MAX_IMAGE_PIXELS": str(MAX_PIXELS), "VLLM_MEDIA_URL_ALLOW_REDIRECTS": "0"}
        if spec.weight_transfer:
            environment |= TRANSFERS[spec.weight_transfer].environment
        if self._runs_in_one_worker(spec):
            environment["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
        if self.runs_on_cpu and self._is_eager(spec):
            # Without this, the first request for log-probabilities compiles for 17 s in spite of --enforce-eager.
            environment["TORCHDYNAMO_DISABLE"] = "1"
        return environment

    def _is_eager(self, spec: LaunchSpec) -> bool:
        """Return whether vLLM runs without compilation, which takes minutes before a trial's first answer on a CPU."""
        return spec.serving.enforce_eager or (spec.num_tried > 0 and self.runs_on_cpu)

    def _runs_in_one_worker(self, spec: LaunchSpec) -> bool:
        """Return whether vLLM's worker runs inside the engine's process, which saves a second import of vLLM."""
        return self.runs_on_cpu and spec.serving.tensor_parallel_size == spec.data_parallel_size == 1


def find_vllm() -> VllmProgram:
    """Return the `vllm` in LIFECYCLE_VLLM, else `.venv-serve/bin/vllm` beside our environment, else the one on PATH.

    Raises ResourceError if there is none.
    """
    command = _find_command()
    python = command.with_name("python")
    if not python.exists():
        raise ResourceError(f"{command} has no `python` beside it; expected vLLM in a virtual environment of its own")
    try:
        return VllmProgram(command, python, find_package(command, "vllm").version)
    except PackageNotFoundError:
        raise ResourceError(
            f"{command} belongs to no environment with vLLM's package metadata; create the serve environment again"
        ) from None


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
        f"create the serve environment with `{install_command('serve')}`, or set LIFECYCLE_VLLM"
    )


class Vllm:
    """vLLM as a serving engine (implements the protocol `Engine`)."""

    name = "vllm"
    title = "vLLM"
    installation = f"{install_command('serve')}, or set LIFECYCLE_VLLM to the vllm program"
    settings: Mapping[str, str] = SETTINGS
    waiting_requests_metric = "vllm:num_requests_waiting"
    listens_on_sockets = True
    capabilities = Capabilities(
        "safetensors",
        prompt_log_probabilities=True,
        adapters=True,
        new_weights=True,
        prompt_token_ids=True,
        speculation=("ngram", "mtp", "draft"),
        pictures=True,
    )

    def find_program(self) -> VllmProgram:
        return find_vllm()

    def program_in_image(self, *, on_cpu: bool) -> VllmProgram:
        return VllmProgram(Path("vllm"), Path("python"), "image+cpu" if on_cpu else "image")

    def argument_problems(self, arguments: Mapping[str, JsonValue], *, at_once: bool) -> list[str] | UncheckedOptions:
        program = self.find_program()
        return argument_problems(program.python, program.version, arguments, at_once=at_once)

    def root_cause(self, log: str) -> str | None:
        """Return the first exception in vLLM's log that no other exception caused, with its message; None without one.

        Several processes write into one log, each with a prefix, and the first traceback has the cause; the last line
        does not (`RuntimeError: Engine core initialization failed. See root cause above`).
        """
        return root_cause(log, prefix=PREFIX, usage=USAGE, generic=GENERIC)

    def context_tokens(self, client: Client, spec: LaunchSpec) -> int:
        return client.context_tokens()

    def smoke_log_probabilities(self, client: Client) -> list[float]:
        choice = client.complete(SMOKE_PROMPT, max_tokens=SMOKE_TOKENS, ignore_eos=True, echo=True, logprobs=1)
        values = choice.reported(client.url).token_logprobs[-SMOKE_TOKENS:]
        return [math.nan if value is None else value for value in values]

    def predictions(self, client: Client, rows: list[list[int]]) -> list[Predicted]:
        return client.predictions(rows)

    def seeing_predictions(
        self, address: EngineAddress, client: Client, documents: Sequence[SeenDocument]
    ) -> list[Predicted]:
        from stages.serving.vllm.pictures import predictions

        return predictions(address, client, documents)

    def seeing_request(self, request: Mapping[str, Any], document: SeenDocument) -> tuple[str, dict[str, Any]]:
        from stages.serving.vllm.pictures import ROUTE, completing

        return ROUTE, completing(request, document)

    def check_takes_pictures(self, address: EngineAddress, client: Client) -> None:
        from stages.serving.vllm.pictures import check_takes_pictures

        check_takes_pictures(address, client)

    def seeing_answer(self, answer: Answer, document: SeenDocument) -> Choices[Choice]:
        from stages.serving.vllm.pictures import completed

        return completed(answer, document)

    def generate_load(
        self, client: Client, spec: LaunchSpec, benchmark: BenchmarkConfig, folder: Path
    ) -> list[LoadResult]:
        """Run `vllm bench serve` at each concurrency, which writes `benchmark.json` and `.log`; raise ServerError.

        A model that was trained on pictures is asked its recorded conversations with pictures, by our own load.
        """
        if spec.max_images:
            from stages.serving.client import CHAT
            from stages.serving.recorded_chats import chats_with_pictures
            from stages.serving.streamed_load import generate_load

            if chats := chats_with_pictures(spec.folders[spec.served_name].parent, spec):
                return generate_load(client, 0, benchmark, folder, CHAT, chats=chats)
        arguments = [_load_arguments(client, spec, benchmark, concurrency) for concurrency in benchmark.concurrencies]
        results = _run_load_generator(client, arguments, folder)
        return [
            LoadResult(
                concurrency=concurrency,
                num_requests=result["num_prompts"],
                num_failed=result["failed"],
                num_output_tokens=result["total_output_tokens"],
                ttft_ms=float(result["median_ttft_ms"]),
                # Not the median time between chunks: it is 0 for chunks that arrive together, however slow the tokens.
                inter_token_latency_ms=float(result["median_tpot_ms"]),
                output_tokens_per_s=float(result["output_throughput"]),
                accepted_fraction=result["accepted_fraction"],
            )
            for concurrency, result in zip(benchmark.concurrencies, results, strict=True)
        ]

    def check_adapters(self, spec: LaunchSpec) -> None:
        check_adapters(spec)

    def has_room(self, spec: LaunchSpec, adapter: Path) -> bool:
        return has_room(spec, adapter)

    def load_adapter(self, address: EngineAddress, api_key: str, name: str, folder: Path, timeout_s: float) -> None:
        from stages.serving.vllm.swap import load_adapter

        load_adapter(address, api_key, name, folder, timeout_s)

    def unload_adapter(self, address: EngineAddress, api_key: str, name: str, timeout_s: float) -> None:
        from stages.serving.vllm.swap import unload_adapter

        unload_adapter(address, api_key, name, timeout_s)

    def check_takes_weights(self, client: Client, num_tokens: int, dtype: str) -> None:
        from stages.serving.vllm.swap import check_takes_weights

        check_takes_weights(client, num_tokens, dtype)

    def check_takes_adapters(self, client: Client, rank: int, folder: Path | None = None) -> None:
        from stages.serving.vllm.swap import check_takes_adapters

        check_takes_adapters(client, rank, adapted_kinds(folder) if folder else ())

    def check_reads(self, address: EngineAddress, api_key: str, folder: Path, timeout_s: float) -> None:
        from stages.serving.vllm.swap import check_reads

        check_reads(address, api_key, folder, timeout_s)

    def prepare_reloads(self, folder: Path, client: Client | None = None) -> None:
        from stages.serving.vllm.swap import runs_on_cpu

        if runs_on_cpu(client) if client else self.find_program().runs_on_cpu:
            from stages.serving.vllm.swap import prepare_reloads

            prepare_reloads(folder)

    def reload_weights(self, address: EngineAddress, api_key: str, folder: Path, timeout_s: float) -> None:
        from stages.serving.vllm.swap import reload_weights

        reload_weights(address, api_key, folder, timeout_s)

    def weight_transfer(self, device: str, placement: str) -> str | None:
        return chosen("cpu" if self.find_program().runs_on_cpu else device, placement)

    def connected(
        self, address: EngineAddress, api_key: str, spec: LaunchSpec, timeout_s: float
    ) -> AbstractContextManager[WeightConnection]:
        assert spec.weight_transfer, "a server that takes folders is not connected"
        return TRANSFERS[spec.weight_transfer].connected(
            WeightRoutes(address, api_key, timeout_s, sees=bool(spec.max_images)), spec
        )

    def sleep(self, address: EngineAddress, api_key: str, timeout_s: float, *, keeps_weights: bool) -> None:
        from stages.serving.vllm.swap import sleep

        sleep(address, api_key, timeout_s, keeps_weights=keeps_weights)

    def wake_up(self, address: EngineAddress, api_key: str, part: SleepingPart, timeout_s: float) -> None:
        from stages.serving.vllm.swap import wake_up

        wake_up(address, api_key, part, timeout_s)

    def check_serves(self, facts: ModelFacts, serving: ServingConfig) -> None:
        with suppress(ResourceError):  # not installed yet
            if self.find_program().runs_on_cpu:
                whole_prompts(facts, serving)

    def check_loadable(self, facts: ModelFacts, projections: list[Projection], quantization: Quantization) -> None:
        heads, device = servability.AttentionHeads.of(facts.config), servability.serving_device()
        servability.check_servable(projections, heads, quantization, device, servability.cpu_flags())

    def caveats(self, quantization: Quantization) -> list[str]:
        return servability.caveats(quantization, servability.serving_device(), servability.cpu_flags())


def _load_arguments(client: Client, spec: LaunchSpec, benchmark: BenchmarkConfig, concurrency: int) -> list[str]:
    options = {
        "backend": "openai",
        "base-url": client.url,
        "model": spec.model,
        "served-model-name": spec.served_name,
        "dataset-name": "random",
        "random-input-len": benchmark.input_tokens,
        "random-output-len": benchmark.output_tokens,
        "num-prompts": benchmark.requests_per_concurrency * concurrency,
        "num-warmups": concurrency,
        "max-concurrency": concurrency,
        "temperature": 0,
    }
    return ["--disable-tqdm", *(f"--{name}={value}" for name, value in options.items())]


def _run_load_generator(client: Client, argument_lists: list[list[str]], folder: Path) -> list[dict[str, Any]]:
    output, log = folder / "benchmark.json", folder / "benchmark.log"
    with log.open("wb") as stream:
        ended = subprocess.run(
            # -P: else the script's folder, with modules of ours, would come first in its path.
            [find_vllm().python, "-P", LOAD_GENERATOR, client.url, output],
            input=json.dumps(argument_lists).encode(),
            env={**os.environ, **QUIET, "OPENAI_API_KEY": client.api_key},
            stdout=stream,
            stderr=subprocess.STDOUT,
            timeout=LOAD_TIMEOUT_S,
            check=False,
        )
    if ended.returncode:
        last = log.read_text(errors="replace").strip().rpartition("\n")[2]
        reason = f"`vllm bench serve` failed with exit code {ended.returncode}: {last}; its log is {log}"
        raise ServerError(reason, died=was_killed(ended.returncode))
    results: list[dict[str, Any]] = json.loads(output.read_text())
    return results
