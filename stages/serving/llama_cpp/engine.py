"""llama.cpp as a serving engine: GGUF files, on a CPU."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from pydantic import JsonValue

from stages.core.errors import ModelError, RecipeError
from stages.models.projections import Projection
from stages.models.recorded import Predicted
from stages.serving.config import BenchmarkConfig
from stages.serving.engine import Capabilities, LoadResult
from stages.serving.launch import LaunchSpec
from stages.serving.llama_cpp.architectures import BLOCK_SIZE, config_problems
from stages.serving.llama_cpp.program import LlamaCppProgram, find_llama_cpp
from stages.serving.llama_cpp.root_cause import find_root_cause
from stages.serving.quantization import Quantization

if TYPE_CHECKING:
    from stages.serving.client import Client  # its HTTP imports would slow every plan
    from stages.serving.proxy import EngineAddress

NUM_NAMED = 3


class LlamaCpp:
    """The parts of this room, as the protocol names them."""

    name = "llama_cpp"
    title = "llama.cpp"
    installation = "make llama-cpp, or set LIFECYCLE_LLAMA_CPP to the python of an environment with xllamacpp"
    settings: dict[str, str] = {}  # noqa: RUF012 (never written)
    waiting_requests_metric = "llamacpp:requests_deferred"
    listens_on_sockets = True
    capabilities = Capabilities(
        "gguf",
        idle_fields=(
            *("dtype", "tensor_parallel_size", "kv_cache_memory_gib", "enforce_eager", "trust_remote_code"),
            "arguments",
        ),
    )

    def find_program(self) -> LlamaCppProgram:
        return find_llama_cpp()

    def program_in_image(self, *, on_cpu: bool) -> LlamaCppProgram:
        raise RecipeError("serving with llama.cpp in Kubernetes: there is no image of it; serve with vllm")

    def argument_problems(self, arguments: Mapping[str, JsonValue]) -> list[str]:
        return []

    def root_cause(self, log: str) -> str | None:
        return find_root_cause(log)

    def context_tokens(self, client: Client) -> int:
        return int(client.models()[0]["meta"]["n_ctx"])

    def predictions(self, client: Client, rows: list[list[int]]) -> list[Predicted]:
        from stages.serving.llama_cpp.predictions import predictions

        return predictions(client, rows)

    def smoke_log_probabilities(self, client: Client) -> list[float]:
        return [*self.predictions(client, [[*range(4)]])[0].log_probabilities]

    def generate_load(
        self, client: Client, spec: LaunchSpec, benchmark: BenchmarkConfig, folder: Path
    ) -> list[LoadResult]:
        from stages.serving.streamed_load import generate_load

        return generate_load(client, int(client.models()[0]["meta"]["n_vocab"]), benchmark, folder)

    def check_adapters(self, spec: LaunchSpec) -> None:
        _refuse_adapters()

    def has_room(self, spec: LaunchSpec, adapter: Path) -> bool:
        return False

    def load_adapter(self, address: EngineAddress, api_key: str, name: str, folder: Path, timeout_s: float) -> None:
        _refuse_adapters()

    def unload_adapter(self, address: EngineAddress, api_key: str, name: str, timeout_s: float) -> None:
        _refuse_adapters()

    def prepare_reloads(self, folder: Path) -> None:
        _refuse_reloads()

    def reload_weights(self, address: EngineAddress, api_key: str, folder: Path, timeout_s: float) -> None:
        _refuse_reloads()

    def check_loadable(
        self, model_config: dict[str, Any], projections: list[Projection], quantization: Quantization
    ) -> None:
        if problems := "; ".join(config_problems(model_config)):
            raise RecipeError(f"the model cannot be written as GGUF: {problems}. Choose another method")
        uneven = [layer for layer in quantization.layers(projections) if layer.input_size % BLOCK_SIZE]
        if uneven and quantization.weights != "f16":
            named = ", ".join(f"{layer.name} ({layer.input_size})" for layer in uneven[:NUM_NAMED])
            raise RecipeError(
                f"{quantization.weights} has a scale for every {BLOCK_SIZE} inputs, which do not divide those of "
                f"{named}; add them to `ignore`, or say `gguf_type: f16`"
            )

    def caveats(self, quantization: Quantization) -> list[str]:
        return []


def _refuse_adapters() -> NoReturn:
    raise ModelError("llama.cpp serves no adapters of ours; merge them (`kind: merge`), and quantize what comes out")


def _refuse_reloads() -> NoReturn:
    raise ModelError("llama.cpp loads its weights once; completions to learn from are sampled by vllm")
