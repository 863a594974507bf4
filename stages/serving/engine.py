"""Serving engines: the protocol that each implements, the launch spec of a server, and code that engines share.

A new engine is a module and a line in `registry.py`. It lives in an environment of its own and is never imported: its
program is started and spoken to over HTTP, through a proxy (`proxy.py`) that alone reaches it. It answers `/health`,
`/metrics`, `/v1/models` and `/v1/completions` as OpenAI's clients expect, with a bearer token from its environment;
what not all support is in their `Capabilities`.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NoReturn, Protocol

from pydantic import AliasChoices, Field, JsonValue

from stages.core.cache import note_use
from stages.core.contract import StrictModel
from stages.core.errors import ModelError, RecipeError
from stages.core.files import write_atomically
from stages.core.redaction import shortened
from stages.data.media.addresses import kind_of_address
from stages.models.facts import ModelFacts
from stages.models.linear_layers import Projection, matches
from stages.models.media import SHOWN_TO_ANY
from stages.models.processor_files import reads_media, settings_of
from stages.models.recorded import Predicted, trained_on_media
from stages.serving.config import DEFAULT_MAX_IMAGES, BenchmarkConfig, ServingConfig, Speculation, SpeculationMethod
from stages.serving.pictures import SERVED, Limits

if TYPE_CHECKING:  # their HTTP imports would slow every plan
    from stages.remote.http import Answer
    from stages.serving.backend import EngineAddress
    from stages.serving.client import Choice, Choices, Client
    from stages.serving.held_weights import HeldWeights


LAUNCH_FILE = "launch.json"
PARSER_TIMEOUT_S = 300.0
REASON_CHARACTERS = 200
SleepingPart = Literal["weights", "kv_cache"]
"""Parts of a sleeping server's device memory, taken again one after another."""


class LaunchSpec(StrictModel):
    """Launch spec: everything needed to start the same server again; a serve stage stores it as `launch.json`.

    Files written before there was more than one engine have `vllm_version`. model: folder of the weights, or of the
    adapters' base. served_name: name that requests ask for by default.
    """

    model: Path
    served_name: str
    adapters: dict[str, Path] = Field(
        default_factory=dict, description="Folders of the served adapters, by the names that requests use."
    )
    base_name: str | None = Field(
        None, description="Name that requests use for the base model itself, if `served_name` is an adapter's."
    )
    swaps_adapters: bool = Field(
        False, description="True if more adapters of `model` may be loaded while the server runs."
    )
    for_training: bool = Field(
        False,
        description="True if training learns from the answers: new weights may be loaded, and the model's own "
        "sampling defaults are ignored.",
    )
    num_tried: int = Field(
        0,
        description="Number of servers started together for a short trial, this one included: they start fast and "
        "share the GPUs. 0: no trial.",
    )
    data_parallel_size: int = Field(1, description="Copies of the model in the server, each on devices of its own.")
    sleeps: bool = Field(
        False, description="True if training uses the same devices: it frees their memory while it sleeps."
    )
    weight_transfer: str | None = Field(
        None, description="Way in which it takes new weights from the training without a folder; None: by folders."
    )
    gpu_share: float | None = Field(
        None, description="Share of a GPU's memory that the server may take, 0 to 1; None: the engine's default."
    )
    serving: ServingConfig
    speculation: Speculation | None = Field(None, description="Guessing of tokens ahead; None: none.")
    engine: str = "vllm"
    engine_version: str = Field(validation_alias=AliasChoices("engine_version", "vllm_version"))

    @property
    def lost_draft(self) -> str | None:
        """Return a sentence's part that names the draft model if its folder is gone; None if it is there, or none is.

        Artifacts that others hold are kept; a draft model is not, since answers are the same without it.
        """
        draft = self.speculation.draft if self.speculation else None
        return f"its draft model {draft} is not in the store" if draft and not draft.is_dir() else None

    @property
    def own_name(self) -> str:
        """Name that requests use for the model itself rather than for one of its adapters."""
        return self.base_name or self.served_name

    @property
    def folders(self) -> dict[str, Path]:
        """Folders of the served model and of its adapters, by the names that requests use."""
        return {self.own_name: self.model, **self.adapters}

    @cached_property
    def facts(self) -> ModelFacts:
        """Architecture and sizes of the served model, read from its `config.json`."""
        return ModelFacts(self.model)

    @cached_property
    def max_images(self) -> int:
        """Largest number of media of each kind in one request; 0 for a model that reads text alone."""
        return max_images_of(self.model, self.serving)

    @cached_property
    def limits(self) -> Limits:
        """Largest numbers of media in one request: of videos and sounds, if the model or an adapter learned them."""
        return limits_of(self.model, self.folders.values(), self.serving)

    def takes(self, addresses: Sequence[str]) -> bool:
        """Return whether the model takes these media, given as `data:` addresses, in one request."""
        kinds = [*map(kind_of_address, addresses)]
        return all(kinds.count(kind) <= self.limits.of(kind) for kind in kinds)

    def asking(self, name: str) -> LaunchSpec:
        """Return a copy of the launch spec whose default name in requests is `name`, of the model or of an adapter."""
        return self.model_copy(update={"served_name": name, "base_name": self.own_name})

    @property
    def version_tag(self) -> dict[str, str]:
        """Artifact tag with the serving engine's version, such as {"vllm_version": "0.32.0"}."""
        return {f"{self.engine}_version": self.engine_version}


GgufType = Literal["f16", "q8_0", "q6_k", "q5_k_m", "q5_k_s", "q5_0", "q4_k_m", "q4_k_s", "q4_0"]
K_BLOCK_SIZE = 256
"""Number of weights in a block of llama.cpp's K-quant formats."""
WeightFormat = Literal["int4", "int8", "fp8"] | GgufType


def is_k_quant(weights: str) -> bool:
    """Return whether a weight format is one of GGUF's K-quants, which only llama.cpp's own library can write."""
    return "_k" in weights


@dataclass(frozen=True)
class Quantization:
    """Description of a quantization, so that a serving engine can check whether it can serve the quantized model.

    method: name in recipes. group_size: input channels that share a scale (int4). ignore: names or patterns (`re:…`) of
    layers that stay unquantized. tensor_parallel_size: of the server.
    """

    method: str
    weights: WeightFormat
    group_size: int
    symmetric: bool
    ignore: tuple[str, ...]
    tensor_parallel_size: int

    def layers(self, projections: list[Projection]) -> list[Projection]:
        """Return those of a model's linear layers that are to be quantized."""
        return [layer for layer in projections if not matches(layer.name, self.ignore)]


@dataclass(frozen=True)
class UncheckedOptions:
    """Reason why a server's options could not be checked: the end of `whether ENGINE takes them …`."""

    why: str


LATER = UncheckedOptions("is asked when it runs")


@dataclass(frozen=True)
class SeenDocument:
    """Document with media. tokens: of the trainer; prompt: the same, with a placeholder for each medium's tokens.

    pictures: `data:` addresses of media, in order.
    """

    tokens: list[int]
    prompt: list[int]
    pictures: list[str]


WeightFiles = Literal["safetensors", "gguf"]


def max_images_of(model: Path, serving: ServingConfig) -> int:
    """Return the largest number of media of each kind in one request; 0 for a model that reads text alone."""
    return (serving.max_images or DEFAULT_MAX_IMAGES) if reads_media(model) else 0


def limits_of(model: Path, learned: Iterable[Path], serving: ServingConfig) -> Limits:
    """Return the limits of requests to a model folder. learned: folders of all that is served: model and adapters."""
    most = max_images_of(model, serving)
    if not most:
        return Limits()
    kinds = SHOWN_TO_ANY.union(*map(trained_on_media, learned))
    return Limits(most, {kind: SERVED[kind].taken(settings_of(kind, model)) for kind in kinds})


@dataclass(frozen=True)
class Capabilities:
    """Capabilities of a serving engine, such as adapters; recipes that need more are refused.

    weights: kind of files that it reads. prompt_log_probabilities: whether `/v1/completions` gives them with `echo`,
    for tasks that compare log-likelihoods. new_weights: whether a running server takes other weights, for methods that
    learn from completions. token_prompts: whether `/v1/completions` takes token ids; else what is served is not
    compared with its training's record. stop_texts: whether an answer may end at any text. prompt_token_ids: whether
    `/v1/chat/completions` returns those of the rendered prompt. dtypes: that it computes in. speculation: methods by
    which it guesses tokens ahead. pictures: whether it serves models that see, as they were trained. idle_fields:
    fields of `serving` that it does not use.
    """

    weights: WeightFiles
    prompt_log_probabilities: bool = False
    adapters: bool = False
    new_weights: bool = False
    token_prompts: bool = True
    stop_texts: bool = True
    prompt_token_ids: bool = False
    dtypes: tuple[str, ...] = ("float32", "bfloat16", "float16")
    speculation: tuple[SpeculationMethod, ...] = ()
    pictures: bool = False
    idle_fields: tuple[str, ...] = ()


class Program(Protocol):
    """Protocol of an engine's installed program: its path, its version, and how to start its server."""

    @property
    def command(self) -> Path: ...

    @property
    def version(self) -> str: ...

    def server_command(self, spec: LaunchSpec, address: EngineAddress) -> list[str]:
        """Return the command line of a server that listens only at `address`; the API key is in its environment."""

    def server_environment(self, spec: LaunchSpec, api_key: str) -> dict[str, str]:
        """Return all environment variables of the engine's server process, which runs in a temporary folder."""


@dataclass(frozen=True)
class LoadResult:
    """Benchmark result at `concurrency` concurrent requests: median latencies in ms, and total throughput.

    inter_token_latency_ms: median over requests of the mean time to each token after the first. accepted_fraction:
    share of the tokens guessed ahead that the model accepted; None where none were guessed.
    """

    concurrency: int
    num_requests: int
    num_failed: int
    num_output_tokens: int
    ttft_ms: float
    inter_token_latency_ms: float
    output_tokens_per_s: float
    accepted_fraction: float | None = None


class WeightConnection(Protocol):
    """Connection of a training with a running server (protocol), by which the server gets new weights."""

    def give(self, weights: HeldWeights) -> None:
        """Replace the server's weights by these. No request may be under way.

        Raises ServerError where the server or its connection refuses them, and should be ended; TransientError for no
        answer.
        """


class Engine(Protocol):
    """Protocol of a serving engine, such as vLLM: how to start its server, query it and change its weights.

    name: in recipes, records and metrics (`NAME_version`). title: in messages. installation: what to do when it is
    missing. settings: environment variables of every server. waiting_requests_metric: that of queued requests in
    `/metrics`. listens_on_sockets: whether on a Unix socket; if not, it gets a port of the loopback.
    """

    name: str
    title: str
    settings: Mapping[str, str]
    waiting_requests_metric: str
    listens_on_sockets: bool
    capabilities: Capabilities

    @property
    def installation(self) -> str: ...

    def find_program(self) -> Program:
        """Return the engine's installed program. Raises ResourceError, with how to install it, if it is missing."""

    def program_in_image(self, *, on_cpu: bool) -> Program:
        """Return the engine's program in a container image that was made for the engine."""

    def argument_problems(self, arguments: Mapping[str, JsonValue], *, at_once: bool) -> list[str] | UncheckedOptions:
        """Return `OPTION: reason` for server options that the engine refuses; UncheckedOptions if it cannot be asked.

        at_once: without checks that take seconds. Raises ResourceError if the engine is not installed.
        """

    def root_cause(self, log: str) -> str | None:
        """Return from a server's log why it died or did not start; None if the log does not say."""

    def context_tokens(self, client: Client, spec: LaunchSpec) -> int:
        """Return the context length of a running server, prompt and answer together, in tokens."""

    def smoke_log_probabilities(self, client: Client) -> list[float]:
        """Return a few generated tokens' log-probabilities, to check a new server; raise ServerError for none."""

    def predictions(self, client: Client, rows: list[list[int]]) -> list[Predicted]:
        """Return the server's ln p of each given token but the first, and the likeliest token at its position.

        The likeliest tokens are left out if the engine gives no token ids.
        """

    def check_takes_pictures(self, address: EngineAddress, client: Client) -> None:
        """Raise ServerError unless a server that the user started answers prompts of token ids and pictures.

        The message says how to start it. Raises TransientError for no answer.
        """

    def seeing_predictions(
        self, address: EngineAddress, client: Client, documents: Sequence[SeenDocument]
    ) -> list[Predicted]:
        """Return the engine's predictions, as `predictions` does, of documents with pictures.

        Raises ServerError if the engine refuses one, or reads a picture as other tokens than the trainer.
        """

    def seeing_request(self, request: Mapping[str, Any], document: SeenDocument) -> tuple[str, dict[str, Any]]:
        """Return the engine's own route for prompts with pictures, and the body that asks there what `request` asks.

        request: to `/v1/completions`. document: the prompt.
        """

    def seeing_answer(self, answer: Answer, document: SeenDocument) -> Choices[Choice]:
        """Return an answer of that route as one of `/v1/completions`.

        Raises ServerError for a malformed one, or if the engine read a picture as other tokens than the trainer.
        """

    def generate_load(
        self, client: Client, spec: LaunchSpec, benchmark: BenchmarkConfig, folder: Path
    ) -> list[LoadResult]:
        """Run the load benchmark; write `benchmark.json` and `.log` into `folder`; raise ServerError if it fails."""

    def check_adapters(self, spec: LaunchSpec) -> None:
        """Raise ModelError, with a remedy, if configs and headers show that the adapters of `spec` cannot be served."""

    def has_room(self, spec: LaunchSpec, adapter: Path) -> bool:
        """Return whether a running server could load and fully apply one more adapter, given how it was started."""

    def load_adapter(self, address: EngineAddress, api_key: str, name: str, folder: Path, timeout_s: float) -> None:
        """Load an adapter into a running server; raise ServerError if it refuses, TransientError for no answer."""

    def unload_adapter(self, address: EngineAddress, api_key: str, name: str, timeout_s: float) -> None:
        """Unload an adapter from a running server once no request uses it. Raises as `load_adapter` does."""

    def check_takes_weights(self, client: Client, num_tokens: int, dtype: str) -> None:
        """Raise ServerError unless a server that the user started can take new weights and sample for training.

        The message says how to start it. num_tokens: of prompt and answer. dtype: that it must compute in.
        """

    def check_takes_adapters(self, client: Client, rank: int, folder: Path | None = None) -> None:
        """Raise ServerError unless a server that the user started can load and fully apply adapters of a LoRA rank.

        The message says how to start it. folder: of such an adapter, once there is one.
        """

    def check_reads(self, address: EngineAddress, api_key: str, folder: Path, timeout_s: float) -> None:
        """Raise ServerError unless a running server, which stays as it is, can read files that we write to `folder`."""

    def prepare_reloads(self, folder: Path, client: Client | None = None) -> None:
        """Prepare a model folder so that a server can start from it, or load new weights from it while it runs.

        The caller owns the folder. client: of the server, if others started it.
        """

    def reload_weights(self, address: EngineAddress, api_key: str, folder: Path, timeout_s: float) -> None:
        """Replace a running server's weights, started `for_training`, by those in `folder`.

        No request may be under way. Raises as `load_adapter` does.
        """

    def weight_transfer(self, device: str, placement: str) -> str | None:
        """Return the way of new weights to a server on this kind of device (`DeviceType.name`); None: by folders.

        placement: whether the training has the same devices, `colocated`, or the server its own, `separate`.
        """

    def connected(
        self, address: EngineAddress, api_key: str, spec: LaunchSpec, timeout_s: float
    ) -> AbstractContextManager[WeightConnection]:
        """Connect this process with a running server whose `spec` has a `weight_transfer`, until the context ends.

        Raises as `load_adapter` does.
        """

    def sleep(self, address: EngineAddress, api_key: str, timeout_s: float, *, keeps_weights: bool) -> None:
        """Let a running server, started as one that `sleeps`, free device memory. No request may be under way.

        keeps_weights: in the host's memory; else they must be loaded again. Raises as `load_adapter` does.
        """

    def wake_up(self, address: EngineAddress, api_key: str, part: SleepingPart, timeout_s: float) -> None:
        """Let a sleeping server take device memory again for one part; with both it answers requests again.

        Raises as `load_adapter` does.
        """

    def check_serves(self, facts: ModelFacts, serving: ServingConfig) -> None:
        """Raise RecipeError, `FIELD: PROBLEM`, for options with which the engine here could not serve a model."""

    def check_loadable(self, facts: ModelFacts, projections: list[Projection], quantization: Quantization) -> None:
        """Raise RecipeError, with a remedy, if a model's layers could not be served once quantized. facts: before."""

    def caveats(self, quantization: Quantization) -> list[str]:
        """Return warnings about a quantized model that can be served, but with larger errors or more memory than
        promised.
        """


def problems_by_parser(
    engine: str,
    version: str,
    command: Sequence[str | Path],
    options: Mapping[str, Sequence[str]],
    *,
    at_once: bool = False,
) -> list[str] | UncheckedOptions:
    """Return `OPTION: reason` for options that the engine's own parser refuses; UncheckedOptions if it did not run.

    Answers are cached in the home. command: program that reads options from stdin, as JSON, and prints problems as its
    last line. options: name → its arguments on the command line. at_once: only answer from the cache.
    """
    # The engine's version is in the key: another one may know other options.
    asked = json.dumps(options, sort_keys=True)
    key = hashlib.sha256(f"{version} {asked}".encode()).hexdigest()[:24]
    home = Path(os.environ.get("LIFECYCLE_HOME", ".lifecycle")).resolve()
    kept = home / "cache" / f"{engine}-arguments" / f"{key}.json"
    if not kept.is_file():
        if at_once:
            return LATER
        problems = parsed(tuple(command), asked)
        if isinstance(problems, UncheckedOptions):
            return problems
        kept.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(kept, json.dumps(problems))
    note_use(kept)
    problems_kept: list[str] = json.loads(kept.read_text())
    return problems_kept


@functools.cache
def parsed(command: tuple[str | Path, ...], asked: str) -> list[str] | UncheckedOptions:
    """Run a program that checks options with an engine's parser; return the problems, or UncheckedOptions."""
    try:
        ended = subprocess.run(
            command, input=asked, capture_output=True, text=True, timeout=PARSER_TIMEOUT_S, check=False
        )
    except subprocess.TimeoutExpired:
        return _unable(f"no answer within {PARSER_TIMEOUT_S:g} s")
    if ended.returncode:
        errors = [line.strip() for line in ended.stderr.splitlines() if line.strip()]
        return _unable(shortened(errors[-1], REASON_CHARACTERS) if errors else f"exit status {ended.returncode}")
    problems: list[str] = json.loads(ended.stdout.splitlines()[-1])
    return problems


def _unable(reason: str) -> UncheckedOptions:
    return UncheckedOptions(
        f"was not checked: its parser does not run here ({reason}); its server says at its start what it does not take"
    )


def dtype_of(spec: LaunchSpec) -> str:
    """Return the recipe's dtype, but bfloat16 for `auto` with fp32 weights, where engines would choose float16."""
    stored = spec.facts.config
    if spec.serving.dtype == "auto" and "float32" in (stored.get("dtype"), stored.get("torch_dtype")):
        return "bfloat16"
    return spec.serving.dtype


class FixedWeights:
    """Mixin for engines that serve no adapters and load their weights only once.

    `Capabilities` refuse recipes that ask for more; these errors are the last line of defence.
    """

    title: str

    def program_in_image(self, *, on_cpu: bool) -> NoReturn:
        raise RecipeError(f"serving with {self.title} in Kubernetes: there is no image of it; serve with vllm")

    def has_room(self, spec: LaunchSpec, adapter: Path) -> bool:
        return False

    def _refuse_adapters(self, *_: object, **__: object) -> NoReturn:
        raise ModelError(f"{self.title} serves no adapters; merge them (`kind: merge`), and serve the merged model")

    check_adapters = load_adapter = unload_adapter = check_takes_adapters = _refuse_adapters

    def _refuse_reloads(self, *_: object, **__: object) -> NoReturn:
        raise ModelError(f"{self.title} loads its weights once; completions to learn from are sampled by vllm")

    def _refuse_pictures(self, *_: object) -> NoReturn:
        raise ModelError(f"{self.title} serves no model that sees; vllm does")

    check_takes_pictures = seeing_predictions = seeing_request = seeing_answer = _refuse_pictures

    check_takes_weights = check_reads = prepare_reloads = reload_weights = sleep = wake_up = _refuse_reloads
    weight_transfer = connected = _refuse_reloads

    def check_serves(self, facts: ModelFacts, serving: ServingConfig) -> None:
        """Accept every model; its server says at its start what it does not serve."""

    def check_loadable(self, facts: ModelFacts, projections: list[Projection], quantization: Quantization) -> None:
        """Accept every quantized model; engines that can serve only some override this check."""

    def caveats(self, quantization: Quantization) -> list[str]:
        return []
