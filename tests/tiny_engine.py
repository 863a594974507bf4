"""Serving engine that only tests register, which proves that a new engine needs one module and a registry entry."""

import json
import os
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stages.core.errors import ModelError, RecipeError, ServerError
from stages.models.facts import ModelFacts
from stages.models.linear_layers import Projection
from stages.models.recorded import Predicted
from stages.remote.http import AnswerModel
from stages.serving.backend import EngineAddress
from stages.serving.client import Client, Models
from stages.serving.config import BenchmarkConfig, ServingConfig
from stages.serving.engine import Capabilities, LaunchSpec, LoadResult, Quantization

PROGRAM = Path(__file__).with_name("tiny_openai_server.py")


class Listed(AnswerModel):
    context: int


@dataclass(frozen=True)
class TinyProgram:
    command: Path = PROGRAM
    version: str = "1.2"

    def server_command(self, spec: LaunchSpec, address: EngineAddress) -> list[str]:
        return [sys.executable, str(self.command), str(spec.model), spec.served_name, "127.0.0.1", str(address.port)]

    def server_environment(self, spec: LaunchSpec, api_key: str) -> dict[str, str]:
        return {**os.environ, "TINY_KEY": api_key}


class TinyEngine:
    name = "tiny"
    title = "Tiny"
    installation = "it is part of the tests"
    settings: dict[str, str] = {}  # noqa: RUF012
    waiting_requests_metric = "tiny_waiting"
    listens_on_sockets = False
    capabilities = Capabilities("safetensors")
    answer_tokens: int | None = None
    """Number of tokens in each answer during a load test. None means as many as requested."""
    accepted_fraction: float | None = None
    """Share of the tokens guessed ahead that is reported as accepted; None where none are guessed."""

    def find_program(self) -> TinyProgram:
        return TinyProgram()

    def program_in_image(self, *, on_cpu: bool) -> TinyProgram:
        return TinyProgram(Path("tiny"), "image")

    def argument_problems(self, arguments: Mapping[str, Any], *, at_once: bool) -> list[str]:
        return []

    def root_cause(self, log: str) -> str | None:
        return next((line for line in log.splitlines() if line.startswith("tiny: ")), None)

    def context_tokens(self, client: Client, spec: LaunchSpec) -> int:
        return client.answer("/v1/models", Models[Listed]).data[0].context

    def smoke_log_probabilities(self, client: Client) -> list[float]:
        return client.complete("What is 1 + 2?").reported(client.url).token_logprobs[-2:]

    def predictions(self, client: Client, rows: list[list[int]]) -> list[Predicted]:
        raise ServerError("Tiny tells no log-probabilities of prompts")

    def generate_load(
        self, client: Client, spec: LaunchSpec, benchmark: BenchmarkConfig, folder: Path
    ) -> list[LoadResult]:
        results = []
        for concurrency in benchmark.concurrencies:
            started_s = time.monotonic()
            client.complete("What is 1 + 2?", max_tokens=benchmark.output_tokens)
            elapsed_s = time.monotonic() - started_s
            num_tokens = self.answer_tokens or benchmark.output_tokens
            times = (elapsed_s * 1000, elapsed_s * 1000, 1 / elapsed_s)
            results.append(LoadResult(concurrency, 1, 0, num_tokens, *times, self.accepted_fraction))
        (folder / "benchmark.json").write_text(json.dumps([vars(result) for result in results]))
        return results

    def check_adapters(self, spec: LaunchSpec) -> None:
        raise ModelError("Tiny serves no adapters")

    def has_room(self, spec: LaunchSpec, adapter: Path) -> bool:
        return False

    def load_adapter(self, address: EngineAddress, api_key: str, name: str, folder: Path, timeout_s: float) -> None:
        raise ModelError("Tiny serves no adapters")

    def unload_adapter(self, address: EngineAddress, api_key: str, name: str, timeout_s: float) -> None:
        raise ModelError("Tiny serves no adapters")

    def check_takes_weights(self, client: Client, num_tokens: int, dtype: str) -> None:
        raise ModelError("Tiny loads its weights once")

    def check_takes_adapters(self, client: Client, rank: int, folder: Path | None = None) -> None:
        raise ModelError("Tiny serves no adapters")

    def check_reads(self, address: EngineAddress, api_key: str, folder: Path, timeout_s: float) -> None:
        raise ModelError("Tiny loads its weights once")

    def prepare_reloads(self, folder: Path, client: Client | None = None) -> None:
        raise ModelError("Tiny loads its weights once")

    def reload_weights(self, address: EngineAddress, api_key: str, folder: Path, timeout_s: float) -> None:
        raise ModelError("Tiny loads its weights once")

    def check_serves(self, facts: ModelFacts, serving: ServingConfig) -> None: ...

    def check_loadable(self, facts: ModelFacts, projections: list[Projection], quantization: Quantization) -> None:
        if quantization.weights == "fp8":
            raise RecipeError("Tiny loads no fp8 weights; choose method int8")

    def caveats(self, quantization: Quantization) -> list[str]:
        return ["Tiny adds in float64"]
