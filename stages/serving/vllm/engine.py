"""vLLM as a serving engine."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import JsonValue

from stages.models.projections import Projection
from stages.models.recorded import Predicted
from stages.serving.config import BenchmarkConfig
from stages.serving.engine import Capabilities, LoadResult
from stages.serving.launch import LaunchSpec
from stages.serving.own_parser import NotAsked
from stages.serving.quantization import Quantization
from stages.serving.vllm import servability
from stages.serving.vllm.adapters import check_adapters, has_room
from stages.serving.vllm.arguments import argument_problems
from stages.serving.vllm.load import generate_load
from stages.serving.vllm.program import SETTINGS, VllmProgram, find_vllm
from stages.serving.vllm.root_cause import find_root_cause

if TYPE_CHECKING:
    from stages.serving.backend import EngineAddress
    from stages.serving.client import Client  # its HTTP imports would slow every plan


SMOKE_PROMPT = "1 + 1 = 2"
"""Several tokens: on CPUs with AMX, attention of vLLM 0.32 in bf16 dies by SIGILL until a product of two matrices,
which a single token does not need, has asked the kernel for the tile registers."""
SMOKE_TOKENS = 2


class Vllm:
    """The parts of this room, as the protocol names them."""

    name = "vllm"
    title = "vLLM"
    installation = "make environments, or set LIFECYCLE_VLLM to the vllm program"
    settings = SETTINGS
    waiting_requests_metric = "vllm:num_requests_waiting"
    listens_on_sockets = True
    capabilities = Capabilities(
        "safetensors", prompt_log_probabilities=True, adapters=True, new_weights=True, prompt_token_ids=True
    )

    def find_program(self) -> VllmProgram:
        return find_vllm()

    def program_in_image(self, *, on_cpu: bool) -> VllmProgram:
        return VllmProgram(Path("vllm"), Path("python"), "image+cpu" if on_cpu else "image")

    def argument_problems(self, arguments: Mapping[str, JsonValue], *, at_once: bool) -> list[str] | NotAsked:
        program = self.find_program()
        return argument_problems(program.python, program.version, arguments, at_once=at_once)

    def root_cause(self, log: str) -> str | None:
        return find_root_cause(log)

    def context_tokens(self, client: Client, spec: LaunchSpec) -> int:
        return client.context_tokens()

    def smoke_log_probabilities(self, client: Client) -> list[float]:
        choice = client.complete(SMOKE_PROMPT, max_tokens=SMOKE_TOKENS, ignore_eos=True, echo=True, logprobs=1)
        values = choice.reported(client.url).token_logprobs[-SMOKE_TOKENS:]
        return [math.nan if value is None else value for value in values]

    def predictions(self, client: Client, rows: list[list[int]]) -> list[Predicted]:
        return client.predictions(rows)

    def generate_load(
        self, client: Client, spec: LaunchSpec, benchmark: BenchmarkConfig, folder: Path
    ) -> list[LoadResult]:
        return generate_load(client, spec, benchmark, folder)

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
        from stages.serving.vllm.named_server import check_takes_weights

        check_takes_weights(client, num_tokens, dtype)

    def check_reads(self, address: EngineAddress, api_key: str, folder: Path, timeout_s: float) -> None:
        from stages.serving.vllm.named_server import check_reads

        check_reads(address, api_key, folder, timeout_s)

    def prepare_reloads(self, folder: Path, client: Client | None = None) -> None:
        from stages.serving.vllm.named_server import runs_on_cpu

        if runs_on_cpu(client) if client else self.find_program().runs_on_cpu:
            from stages.serving.vllm.swap import prepare_reloads

            prepare_reloads(folder)

    def reload_weights(self, address: EngineAddress, api_key: str, folder: Path, timeout_s: float) -> None:
        from stages.serving.vllm.swap import reload_weights

        reload_weights(address, api_key, folder, timeout_s)

    def check_loadable(
        self, model_config: dict[str, Any], projections: list[Projection], quantization: Quantization
    ) -> None:
        heads, device = servability.Heads.of(model_config), servability.serving_device()
        servability.check_servable(projections, heads, quantization, device, servability.cpu_flags())

    def caveats(self, quantization: Quantization) -> list[str]:
        return servability.caveats(quantization, servability.serving_device(), servability.cpu_flags())
