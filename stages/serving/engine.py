"""What a serving engine does: find its program, start it, explain its death, and say what it can load.

One room an engine, one line in `registry.py`. An engine lives in an environment of its own and is never imported: its
program is started and spoken to over HTTP, through a proxy (`proxy.py`) that alone reaches it. It answers `/health`,
`/metrics`, `/v1/models` and `/v1/completions` as OpenAI's clients expect, and takes the bearer token that its
environment gives it. What not all of them can do is among its `Capabilities`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol

from pydantic import JsonValue

from stages.models.projections import Projection
from stages.models.recorded import Predicted
from stages.serving.config import BenchmarkConfig
from stages.serving.launch import LaunchSpec
from stages.serving.own_parser import NotAsked
from stages.serving.quantization import Quantization

if TYPE_CHECKING:  # their HTTP imports would slow every plan
    from stages.serving.backend import EngineAddress
    from stages.serving.client import Client


WeightFiles = Literal["safetensors", "gguf"]


@dataclass(frozen=True)
class Capabilities:
    """weights: the kind of files that it serves. prompt_log_probabilities: whether `/v1/completions` gives them with
    `echo`, as tasks that compare log-likelihoods ask. adapters: whether it puts them on a model. new_weights: whether a
    running server takes others, as methods that learn from completions need. token_prompts: whether `/v1/completions`
    takes prompts as token ids; others are asked in texts, and compared with no record of training. stop_texts: whether
    any text may end an answer. prompt_token_ids: whether `/v1/chat/completions` tells the tokens of the prompt that it
    made. dtypes: that it computes in. idle_fields: of `serving`, those that it has no use for.
    """

    weights: WeightFiles
    prompt_log_probabilities: bool = False
    adapters: bool = False
    new_weights: bool = False
    token_prompts: bool = True
    stop_texts: bool = True
    prompt_token_ids: bool = False
    dtypes: tuple[str, ...] = ("float32", "bfloat16", "float16")
    idle_fields: tuple[str, ...] = ()


class Program(Protocol):
    """An installed engine."""

    @property
    def command(self) -> Path: ...

    @property
    def version(self) -> str: ...

    def server_command(self, spec: LaunchSpec, address: EngineAddress) -> list[str]:
        """The command line of a server that listens at `address` alone; the API key travels in the environment."""

    def server_environment(self, spec: LaunchSpec, api_key: str) -> dict[str, str]:
        """The whole environment of a server, whose working folder will be a temporary one of its own."""


@dataclass(frozen=True)
class LoadResult:
    """What a load of `concurrency` requests at a time measured: medians in ms, and tokens per second in all.

    inter_token_latency_ms: of a request, the mean time to each token after the first. num_output_tokens: of all
    answers.
    """

    concurrency: int
    num_requests: int
    num_failed: int
    num_output_tokens: int
    ttft_ms: float
    inter_token_latency_ms: float
    output_tokens_per_s: float


class Engine(Protocol):
    """name: in recipes, records and metrics, `NAME_version` among them. title: in messages. installation: what to do
    when it is missing. settings: environment variables of every server. waiting_requests_metric: of its `/metrics`.
    listens_on_sockets: whether it can listen on a Unix socket; one that cannot gets a port of the loopback.
    """

    @property
    def name(self) -> str: ...
    @property
    def title(self) -> str: ...
    @property
    def installation(self) -> str: ...
    @property
    def settings(self) -> Mapping[str, str]: ...
    @property
    def waiting_requests_metric(self) -> str: ...

    @property
    def listens_on_sockets(self) -> bool: ...
    @property
    def capabilities(self) -> Capabilities: ...

    def find_program(self) -> Program:
        """The installed program. Raises ResourceError, with how to get one, when there is none."""

    def program_in_image(self, *, on_cpu: bool) -> Program:
        """The program as it is found in a container image that was made for it."""

    def argument_problems(self, arguments: Mapping[str, JsonValue], *, at_once: bool) -> list[str] | NotAsked:
        """`OPTION: why`, of what this engine cannot be started with; or why that is not known.

        at_once: what takes seconds to know is not asked. Raises ResourceError when it is not installed.
        """

    def root_cause(self, log: str) -> str | None:
        """Why the server that wrote `log` died or did not start; None when the log does not say."""

    def context_tokens(self, client: Client, spec: LaunchSpec) -> int:
        """Tokens that a prompt and its answer may have together, on a server of `spec`."""

    def smoke_log_probabilities(self, client: Client) -> list[float]:
        """A few log-probabilities that the server gives, whatever their tokens. Raises ServerError for none."""

    def predictions(self, client: Client, rows: list[list[int]]) -> list[Predicted]:
        """Of every token of each row but the first: its log-probability, and the likeliest token in its place, unless
        the engine tells no ids of tokens."""

    def generate_load(
        self, client: Client, spec: LaunchSpec, benchmark: BenchmarkConfig, folder: Path
    ) -> list[LoadResult]:
        """Put each of the benchmark's concurrencies on a server; leaves `benchmark.json` and `benchmark.log`.

        Raises ServerError when the load could not be generated.
        """

    def check_adapters(self, spec: LaunchSpec) -> None:
        """Raise ModelError, saying what to change, when this engine could not put the adapters of `spec` on its model.

        Reads configs and headers only.
        """

    def has_room(self, spec: LaunchSpec, adapter: Path) -> bool:
        """Whether a running server of `spec`, which swaps adapters, could load this folder too, and serve all of it."""

    def load_adapter(self, address: EngineAddress, api_key: str, name: str, folder: Path, timeout_s: float) -> None:
        """Into a running server. Raises ServerError when it refuses, TransientError when it does not answer in time."""

    def unload_adapter(self, address: EngineAddress, api_key: str, name: str, timeout_s: float) -> None:
        """Of a running server, which has no more requests for it. Raises as `load_adapter` does."""

    def check_takes_weights(self, client: Client, num_tokens: int, dtype: str) -> None:
        """Raise ServerError, saying how to start it, unless a running server that others started can be given weights
        and learned from. num_tokens: that it must take at a time. dtype: that it must compute in."""

    def check_reads(self, address: EngineAddress, api_key: str, folder: Path, timeout_s: float) -> None:
        """Raise ServerError unless such a server reads what we write to this folder; its weights stay."""

    def prepare_reloads(self, folder: Path, client: Client | None = None) -> None:
        """Make a model's folder, which the caller owns, fit to be started from or loaded by `reload_weights`.

        client: speaks to the server, if others started it."""

    def reload_weights(self, address: EngineAddress, api_key: str, folder: Path, timeout_s: float) -> None:
        """Of a running server of a spec `for_training`, which has no request under way: those of this folder, in the
        place of what it has. Raises as `load_adapter` does."""

    def check_loadable(
        self, model_config: dict[str, Any], projections: list[Projection], quantization: Quantization
    ) -> None:
        """Raise RecipeError, saying what to change, when a model with these layers could not be served quantized.

        model_config: the unquantized model's `config.json`.
        """

    def caveats(self, quantization: Quantization) -> list[str]:
        """What to warn of: the quantized model would be served, but not as its KL or its size promise."""
