"""llama.cpp as the serving engine of GGUF files on a CPU: its program, its log, and the models that it supports.

It lives in an environment of its own, as the wheel `xllamacpp`, and is never imported here.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import JsonValue

from stages.core.errors import RecipeError
from stages.core.redaction import shortened
from stages.core.shipped import install_command
from stages.models.facts import ModelFacts
from stages.models.linear_layers import Projection
from stages.models.model_folder import GGUF_FILE
from stages.models.recorded import Predicted
from stages.serving.config import BenchmarkConfig
from stages.serving.engine import (
    K_BLOCK_SIZE,
    Capabilities,
    FixedWeights,
    LaunchSpec,
    LoadResult,
    Quantization,
    is_k_quant,
)
from stages.serving.interpreter import find_interpreter, inherited_environment

if TYPE_CHECKING:  # their HTTP imports would slow every plan
    from stages.serving.backend import EngineAddress
    from stages.serving.client import Client


SERVER = Path(__file__).with_name("server_program.py")
DEFAULT_SLOTS = 4


MODEL_TYPES = ("llama", "qwen2", "qwen3")
"""Model types (`model_type` in config.json) that GGUF files are written for; each was compared with Transformers."""
LANGUAGE_MODEL = "ForCausalLM"
ROTARY = ("default", "llama3")
BLOCK_SIZE = 32
"""Number of weights that share a scale in every GGUF format but f16."""


ERROR = re.compile(r"^[\d.]+ E (.+)$", re.MULTILINE)
"""Error line in llama.cpp's log: `0.00.567.051 E llama_model_load: … tensor … not within the file bounds`."""
PYTHON = re.compile(r"^(?:server_program\.py: error: .+|[A-Za-z_.]*(?:Error|Exception): .+)$", re.MULTILINE)
GENERIC = "please check the input params"
MAX_CHARACTERS = 600


NUM_NAMED = 3


@dataclass(frozen=True)
class LlamaCppProgram:
    """Installed llama.cpp: the Python interpreter of the wheel `xllamacpp`, and the wheel's version."""

    command: Path
    version: str

    def server_command(self, spec: LaunchSpec, address: EngineAddress) -> list[str]:
        slots = spec.serving.max_num_seqs or DEFAULT_SLOTS
        context = spec.serving.max_model_len or int(spec.facts.config["max_position_embeddings"])
        command = [str(self.command), "-P", str(SERVER), str(spec.model / GGUF_FILE), "--alias", spec.own_name]
        command += ["--socket", str(address.socket), "--context", str(context), "--slots", str(slots)]
        return [*command, "--threads", str(free_cores())]

    def server_environment(self, spec: LaunchSpec, api_key: str) -> dict[str, str]:
        return {**inherited_environment(), "LLAMA_API_KEY": api_key, "PYTHONUNBUFFERED": "1"}


def free_cores() -> int:
    """Return the CPU cores that were idle in the last minute, at least 1, as llama.cpp's number of threads.

    Threads beyond those spin at barriers: an answer of 6 ms on an idle core took 6 s with two threads on two busy ones.
    """
    most = int(os.environ.get("OMP_NUM_THREADS") or 0) or len(os.sched_getaffinity(0))
    return max(1, min(most, len(os.sched_getaffinity(0)) - round(os.getloadavg()[0])))


def find_llama_cpp() -> LlamaCppProgram:
    """Return llama.cpp's Python from LIFECYCLE_LLAMA_CPP, else `.venv-llama-cpp/bin/python` beside our environment.

    Raises ResourceError if there is none, or it has no `xllamacpp`.
    """
    return LlamaCppProgram(
        *find_interpreter(
            "xllamacpp",
            title="llama.cpp",
            variable="LIFECYCLE_LLAMA_CPP",
            environment=".venv-llama-cpp",
            how=install_command("llama-cpp"),
        )
    )


class LlamaCpp(FixedWeights):
    """llama.cpp as a serving engine (implements the protocol `Engine`)."""

    name = "llama_cpp"
    title = "llama.cpp"
    installation = (
        f"{install_command('llama-cpp')}, or set LIFECYCLE_LLAMA_CPP to the python of an environment with xllamacpp"
    )
    settings: Mapping[str, str] = {}
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
        """Return the first error in llama.cpp's log, which causes the later ones; None if the log has no error."""
        errors = [*ERROR.findall(log), *(line for line in PYTHON.findall(log) if GENERIC not in line)]
        return shortened(" ".join(errors[0].split()), MAX_CHARACTERS) if errors else None

    def context_tokens(self, client: Client, spec: LaunchSpec) -> int:
        from stages.serving.llama_cpp.queries import meta_of

        return meta_of(client).n_ctx

    def predictions(self, client: Client, rows: list[list[int]]) -> list[Predicted]:
        from stages.serving.llama_cpp.queries import predictions

        return predictions(client, rows)

    def smoke_log_probabilities(self, client: Client) -> list[float]:
        return [*self.predictions(client, [[*range(4)]])[0].log_probabilities]

    def generate_load(
        self, client: Client, spec: LaunchSpec, benchmark: BenchmarkConfig, folder: Path
    ) -> list[LoadResult]:
        from stages.serving.llama_cpp.queries import meta_of
        from stages.serving.streamed_load import generate_load

        return generate_load(client, meta_of(client).n_vocab, benchmark, folder)

    def check_loadable(self, facts: ModelFacts, projections: list[Projection], quantization: Quantization) -> None:
        if problems := "; ".join(config_problems(facts.config)):
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


def config_problems(config: Mapping[str, Any]) -> Iterator[str]:
    """Yield the reasons why a model with this `config.json` cannot be written as GGUF or run by llama.cpp."""
    if config.get("model_type") not in MODEL_TYPES:
        yield f"its model_type is {config.get('model_type')}; expected {' or '.join(MODEL_TYPES)}"
        return
    if other := [name for name in config.get("architectures") or () if not name.endswith(LANGUAGE_MODEL)]:
        yield f"it is a {', '.join(other)}; expected a language model (…{LANGUAGE_MODEL})"
    rotary = config.get("rope_parameters") or config.get("rope_scaling") or {}
    kind = rotary.get("rope_type") or rotary.get("type") or "default"
    if kind not in ROTARY:
        yield f"its rotary embedding is of type {kind}; expected {' or '.join(ROTARY)}"
    if config.get("use_sliding_window"):
        yield "it attends to a sliding window (use_sliding_window)"
    if config.get("hidden_act", "silu") != "silu":
        yield f"its activation is {config['hidden_act']}; expected silu"
    if config.get("mlp_bias"):
        yield "its feed-forward layers have biases (mlp_bias)"
