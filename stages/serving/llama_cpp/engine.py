"""llama.cpp as a serving engine: GGUF files, on a CPU."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import JsonValue

from stages.core.errors import RecipeError
from stages.models.projections import Projection
from stages.models.recorded import Predicted
from stages.serving.config import BenchmarkConfig
from stages.serving.engine import Capabilities, LoadResult
from stages.serving.fixed_weights import FixedWeights
from stages.serving.launch import LaunchSpec
from stages.serving.llama_cpp.architectures import BLOCK_SIZE, config_problems
from stages.serving.llama_cpp.program import LlamaCppProgram, find_llama_cpp
from stages.serving.llama_cpp.root_cause import find_root_cause
from stages.serving.quantization import K_BLOCK_SIZE, Quantization, is_k_quant

if TYPE_CHECKING:
    from stages.serving.client import Client  # its HTTP imports would slow every plan

NUM_NAMED = 3


class LlamaCpp(FixedWeights):
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
            *("arguments", "tool_call_parser"),
        ),
    )

    def find_program(self) -> LlamaCppProgram:
        return find_llama_cpp()

    def argument_problems(self, arguments: Mapping[str, JsonValue], *, at_once: bool) -> list[str]:
        return []

    def root_cause(self, log: str) -> str | None:
        return find_root_cause(log)

    def context_tokens(self, client: Client, spec: LaunchSpec) -> int:
        from stages.serving.llama_cpp.predictions import meta_of

        return meta_of(client).n_ctx

    def predictions(self, client: Client, rows: list[list[int]]) -> list[Predicted]:
        from stages.serving.llama_cpp.predictions import predictions

        return predictions(client, rows)

    def smoke_log_probabilities(self, client: Client) -> list[float]:
        return [*self.predictions(client, [[*range(4)]])[0].log_probabilities]

    def generate_load(
        self, client: Client, spec: LaunchSpec, benchmark: BenchmarkConfig, folder: Path
    ) -> list[LoadResult]:
        from stages.serving.llama_cpp.predictions import meta_of
        from stages.serving.streamed_load import generate_load

        return generate_load(client, meta_of(client).n_vocab, benchmark, folder)

    def check_loadable(
        self, model_config: dict[str, Any], projections: list[Projection], quantization: Quantization
    ) -> None:
        if problems := "; ".join(config_problems(model_config)):
            raise RecipeError(f"the model cannot be written as GGUF: {problems}. Choose another method")
        layers = quantization.layers(projections)
        uneven = [layer for layer in layers if layer.input_size % BLOCK_SIZE]
        if uneven and quantization.weights != "f16":
            named = ", ".join(f"{layer.name} ({layer.input_size})" for layer in uneven[:NUM_NAMED])
            raise RecipeError(
                f"{quantization.weights} has a scale for every {BLOCK_SIZE} inputs, which do not divide those of "
                f"{named}; add them to `ignore`, or say `gguf_type: f16`"
            )
        if is_k_quant(quantization.weights) and all(layer.input_size % K_BLOCK_SIZE for layer in layers):
            sizes = ", ".join(str(size) for size in sorted({layer.input_size for layer in layers}))
            raise RecipeError(
                f"{quantization.weights} has blocks of {K_BLOCK_SIZE} inputs, which divide those of no layer "
                f"({sizes}); say `gguf_type: q5_0` or q8_0, whose blocks are of 32"
            )
