"""Recipe settings of a model server, its benchmark and its address, and checks of them against the model's config."""

import socket
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, JsonValue, PositiveFloat, PositiveInt, field_validator

from stages.core.contract import Execution, StrictModel
from stages.core.errors import ModelError, TransientError
from stages.core.fields import AddedLater, Seconds
from stages.hubs.answers import PLANNING_LIMIT_S, BackgroundLookups
from stages.models.facts import SPELLINGS, ModelFacts
from stages.models.model_folder import check_config

EngineName = Literal["vllm", "llama_cpp", "sglang", "lmdeploy"]
DEFAULT_MAX_IMAGES = 4
MOST_STOP_TEXTS = 64
"""Largest number of stop texts in one request; every server that a stage starts accepts this many."""
StopTexts = Annotated[tuple[Annotated[str, Field(min_length=1)], ...], Field(max_length=MOST_STOP_TEXTS)]


class ServingConfig(StrictModel):
    """Settings of a serving engine that may change a model's answers or its speed."""

    engine: Annotated[EngineName | None, AddedLater()] = Field(
        None, description="Serving engine. Default: vllm; llama_cpp for a model quantized with `method: gguf`."
    )
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        "auto", description="Dtype of computation. auto: dtype of the weights, but bf16 for fp32 weights."
    )
    max_model_len: PositiveInt | None = Field(
        None, description="Largest context length, prompt and answer together, in tokens. Default: the model's."
    )
    max_num_seqs: PositiveInt | None = Field(
        None, description="Largest number of requests that are computed as one batch. Default: the engine's own."
    )
    tensor_parallel_size: PositiveInt = Field(
        1, description="Tensor parallelism: number of GPUs that share each layer."
    )
    kv_cache_memory_gib: PositiveFloat | None = Field(
        None, description="Memory for the KV cache in GiB. Default: the free memory of a GPU; 4 GiB on a CPU."
    )
    enforce_eager: bool = Field(
        False, description="Eager mode: do not compile or capture graphs; the server starts sooner and runs slower."
    )
    trust_remote_code: bool = Field(False, description="Allow the Python code that comes with the model to run.")
    tool_call_parser: Annotated[str | None, AddedLater()] = Field(
        None,
        min_length=1,
        description="Engine's parser of tool calls. Default: by the chat template for vllm; llama_cpp has its own. "
        "Without one, requests with tools are refused.",
    )
    max_images: Annotated[PositiveInt | None, AddedLater()] = Field(
        None,
        description="Largest number of pictures in one request, for a model that sees; and of videos and sounds each, "
        "for one that learned from them. Default: 4.",
    )
    arguments: Annotated[dict[str, JsonValue], AddedLater()] = Field(
        default_factory=dict,
        description="Further options for the engine's server process, by option name without leading dashes.",
    )

    @field_validator("arguments")
    @classmethod
    def _spelled_with_dashes(cls, arguments: dict[str, JsonValue]) -> dict[str, JsonValue]:
        return {name.removeprefix("--").replace("_", "-"): value for name, value in arguments.items()}


SpeculationMethod = Literal["ngram", "mtp", "draft"]


class Speculation(StrictModel):
    """Method by which a server guesses tokens ahead, which the model accepts or not: its answers are as without.

    ngram: repeats what followed the last tokens before. mtp: the model's own layers of multi-token prediction.
    """

    method: SpeculationMethod
    draft: Path | None = Field(None, description="Folder of the smaller model that guesses, for `draft`.")


class BenchmarkConfig(StrictModel):
    """Settings of the load benchmark that a serve stage runs against its server."""

    concurrencies: tuple[PositiveInt, ...] = Field(
        (1, 8),
        min_length=1,
        description="Numbers of concurrent requests; the benchmark measures speed at each of them.",
    )
    requests_per_concurrency: PositiveInt = Field(
        8,
        description="Requests per concurrent request: 8 means 8 requests at concurrency 1, 64 at concurrency 8.",
    )
    input_tokens: PositiveInt = Field(128, description="Number of tokens of each benchmark prompt.")
    output_tokens: PositiveInt = Field(64, description="Number of tokens of each benchmark answer.")

    @property
    def tokens(self) -> int:
        """Number of tokens of a benchmark prompt and its answer together."""
        return self.input_tokens + self.output_tokens


LESS_MEMORY = "lower serving.kv_cache_memory_gib or serving.max_model_len, or raise execution.slots"
"""Advice in error messages when the kernel kills a server for lack of memory."""


class ServeExecution(Execution):
    """Execution settings of a server: the address that it listens on, and how long it may take to start."""

    host: str = Field(
        "127.0.0.1",
        pattern=r"^[A-Za-z0-9:][A-Za-z0-9.:%_-]*$",
        description="Host name or IP address that the server listens on.",
    )
    port: int | None = Field(
        None, ge=1, le=65535, description="TCP port that the server listens on. Default: a free one."
    )
    ready_timeout_s: Seconds = Field(
        600, description="Time in seconds within which the server must be ready, loading of the model included."
    )

    def problems_here(self) -> Iterator[str]:
        """Yield an error if this machine cannot listen on `host`; a host for a cluster job is not checked."""
        if not self.is_local:
            return
        names = BackgroundLookups[Any](PLANNING_LIMIT_S)
        names.ask(self.host, partial(socket.getaddrinfo, self.host, 0, type=socket.SOCK_STREAM))
        try:
            family = names.of(self.host)[0][0]
            with socket.socket(family, socket.SOCK_STREAM) as probe:
                probe.bind((self.host, 0))
        except OSError as error:
            expected = "expected an address of this machine, such as 127.0.0.1, or 0.0.0.0 for all"
            yield f"host: cannot listen on {self.host}: {error.strerror}; {expected}"
        except TransientError:  # the name server is slow to answer; the model's server will ask it again
            return


LONG_IN_THEMSELVES = ("longrope", "su", "llama3", "default", "mrope")
"""Rotary embedding types whose `max_position_embeddings` already is the extended context length."""
MAY_BE_TOO_LONG = "VLLM_ALLOW_LONG_MAX_MODEL_LEN"
"""Environment variable by which vLLM accepts contexts that are longer than the model's positions."""
BYTES_PER_GIB = 2**30


def limit_problems(
    facts: ModelFacts,
    serving: ServingConfig,
    benchmark: BenchmarkConfig | None,
    environment: Mapping[str, str],
) -> Iterator[tuple[str, str]]:
    """Yield (dotted config field, problem) for server settings that the model's `config.json` does not allow.

    environment: of the server. Raises ModelError for a config that no model has.
    """
    check_config(facts, "its config")
    max_tokens = max_tokens_of(facts.fields)
    if max_tokens is not None and environment.get(MAY_BE_TOO_LONG) != "1":
        yield from _too_long(serving, benchmark, max_tokens)
    yield from _undivided(facts.fields, serving.tensor_parallel_size)
    tokens = serving.max_model_len or max_tokens
    if tokens and serving.kv_cache_memory_gib:
        yield from _too_little_memory(facts, serving, serving.kv_cache_memory_gib, tokens)


def _too_long(serving: ServingConfig, benchmark: BenchmarkConfig | None, max_tokens: int) -> Iterator[tuple[str, str]]:
    if serving.max_model_len and serving.max_model_len > max_tokens:
        found = f"{serving.max_model_len}, but the model has {max_tokens} positions; lower it"
        yield "serving.max_model_len", found
    if benchmark and benchmark.tokens > max_tokens:
        yield (
            "benchmark",
            f"input_tokens and output_tokens are {benchmark.tokens} together, but the model has {max_tokens} "
            "positions; lower them",
        )


def _undivided(fields: Mapping[str, Any], ranks: int) -> Iterator[tuple[str, str]]:
    """Yield a problem unless tensor parallelism splits the attention heads and the feed-forward width evenly."""
    queries = next((fields[name] for name in SPELLINGS["num_heads"] if fields.get(name)), 0)
    keys = fields.get("num_key_value_heads") or queries
    field = "serving.tensor_parallel_size"
    if isinstance(keys, int) and (queries % ranks or (keys % ranks and ranks % keys)):
        possible = [n for n in range(1, min(queries, 64) + 1) if not queries % n and (not keys % n or not n % keys)]
        yield (
            field,
            f"{ranks} ranks, but the model's {queries} attention heads ({keys} of keys) cannot be divided between "
            f"them; {' or '.join(map(str, possible))} can",
        )
    width = fields.get("intermediate_size")
    is_mixture = any(fields.get(name) for name in (*SPELLINGS["num_experts"], "n_routed_experts"))
    if isinstance(width, int) and width % ranks and not is_mixture:
        yield field, f"{ranks} ranks, which do not divide the model's feed-forward width of {width}"


def _too_little_memory(facts: ModelFacts, serving: ServingConfig, gib: float, tokens: int) -> Iterator[tuple[str, str]]:
    """Yield a problem if the KV cache cannot hold one request of full length, for engines then refuse to start."""
    try:
        shape = facts.shape
    except ModelError:  # of a family whose sizes are not known
        return
    if shape.sliding_window:
        return
    bytes_per_value = 4 if serving.dtype == "float32" else 2
    needed = shape.kv_cache_bytes(tokens, bytes_per_value, serving.tensor_parallel_size) / BYTES_PER_GIB
    if needed > gib:
        yield (
            "serving.kv_cache_memory_gib",
            f"{gib:g}, but a request of {tokens} tokens, the most that the server is to take, needs {needed:.3g} GiB; "
            "raise it, or lower serving.max_model_len",
        )


def max_tokens_of(fields: Mapping[str, Any]) -> int | None:
    """Return the context length as vLLM derives it, `max_position_embeddings` × RoPE scaling factor, or None."""
    positions = fields.get("max_position_embeddings")
    rope = fields.get("rope_parameters") or fields.get("rope_scaling") or {}
    kind = rope.get("rope_type") or rope.get("type") or "default"
    if not isinstance(positions, int):
        return None
    if kind in LONG_IN_THEMSELVES:
        return positions
    if kind == "yarn":
        positions = rope.get("original_max_position_embeddings") or positions
    return int(positions * (rope.get("factor") or 1.0))
