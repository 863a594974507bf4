"""Serving engines: the protocol that each implements, how a server is started again, and what several engines share.

One room an engine, one line in `registry.py`. An engine lives in an environment of its own and is never imported: its
program is started and spoken to over HTTP, through a proxy (`proxy.py`) that alone reaches it. It answers `/health`,
`/metrics`, `/v1/models` and `/v1/completions` as OpenAI's clients expect, and takes the bearer token that its
environment gives it. What not all of them can do is among its `Capabilities`.
"""

from __future__ import annotations

import difflib
import functools
import hashlib
import json
import os
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NoReturn, Protocol

from pydantic import AliasChoices, Field, JsonValue

from stages.core.cache_entries import note_use
from stages.core.contract import StrictModel
from stages.core.errors import ModelError, RecipeError
from stages.core.files import write_atomically
from stages.core.redaction import shortened
from stages.models.linear_layers import Projection, matches
from stages.models.model_config import read_config
from stages.models.recorded import Predicted
from stages.serving.config import BenchmarkConfig, ServingConfig

if TYPE_CHECKING:  # their HTTP imports would slow every plan
    from stages.serving.backend import EngineAddress
    from stages.serving.client import Client


LAUNCH_FILE = "launch.json"
PARSER_TIMEOUT_S = 300.0
REASON_CHARACTERS = 200


class LaunchSpec(StrictModel):
    """The content of `launch.json`. Files written before there was more than one engine say `vllm_version`.

    model: the folder of the weights; of adapters, that of their base. served_name: what requests ask for.
    """

    model: Path
    served_name: str
    adapters: dict[str, Path] = Field(default_factory=dict, description="Name in requests → folder of the adapter.")
    base_name: str | None = Field(None, description="Of `model` in requests, where `served_name` is an adapter.")
    swaps_adapters: bool = Field(False, description="Other adapters of `model` may be loaded while it runs.")
    for_training: bool = Field(
        False,
        description="Answers are learned from: other weights may be loaded while it runs, and nothing but the "
        "request says how to sample.",
    )
    num_tried: int = Field(
        0,
        description="Servers that a person tries side by side, this one included, which need to start soon and to "
        "share the devices; 0: it serves others.",
    )
    serving: ServingConfig
    engine: str = "vllm"
    engine_version: str = Field(validation_alias=AliasChoices("engine_version", "vllm_version"))

    @property
    def own_name(self) -> str:
        """Of `model` itself in requests."""
        return self.base_name or self.served_name

    @property
    def folders(self) -> dict[str, Path]:
        """Name in requests → folder, of the model and its adapters."""
        return {self.own_name: self.model, **self.adapters}

    def asking(self, name: str) -> LaunchSpec:
        """The same server, another of whose names is asked for."""
        return self.model_copy(update={"served_name": name, "base_name": self.own_name})

    @property
    def version_tag(self) -> dict[str, str]:
        """`ENGINE_version`: how versions of artifacts and tags have it."""
        return {f"{self.engine}_version": self.engine_version}


GgufType = Literal["f16", "q8_0", "q6_k", "q5_k_m", "q5_k_s", "q5_0", "q4_k_m", "q4_k_s", "q4_0"]
K_BLOCK_SIZE = 256
"""Numbers in a block of a K-quant."""
WeightFormat = Literal["int4", "int8", "fp8"] | GgufType


def is_k_quant(weights: str) -> bool:
    """Whether blocks are K-quants, which llama.cpp's own library makes."""
    return "_k" in weights


@dataclass(frozen=True)
class Quantization:
    """method: as the recipe names it. group_size: input channels that share a scale (int4). ignore: names or patterns
    (`re:…`) of layers that are left alone.
    """

    method: str
    weights: WeightFormat
    group_size: int
    symmetric: bool
    ignore: tuple[str, ...]
    tensor_parallel_size: int

    def layers(self, projections: list[Projection]) -> list[Projection]:
        """Those of a model's layers that are quantized."""
        return [layer for layer in projections if not matches(layer.name, self.ignore)]


@dataclass(frozen=True)
class NotAsked:
    """Nothing is known of options. why: what follows `whether ENGINE takes them`."""

    why: str


LATER = NotAsked("is asked when it runs")


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


def problems_by_parser(
    engine: str,
    version: str,
    command: Sequence[str | Path],
    options: Mapping[str, Sequence[str]],
    *,
    at_once: bool = False,
) -> list[str] | NotAsked:
    """`OPTION: why`, of what this version of an engine does not take; or why its parser has not said so.

    command: reads options from stdin, as JSON, and prints problems as its last line. options: name → as the command
    line has it. at_once: the parser is not asked what it has not been asked before. Where it cannot run, that is not
    kept: it is tried again.
    """
    asked = json.dumps(options, sort_keys=True)
    key = hashlib.sha256(f"{version} {asked}".encode()).hexdigest()[:24]
    home = Path(os.environ.get("LIFECYCLE_HOME", ".lifecycle")).resolve()
    kept = home / "cache" / f"{engine}-arguments" / f"{key}.json"
    if not kept.is_file():
        if at_once:
            return LATER
        problems = parsed(tuple(command), asked)
        if isinstance(problems, NotAsked):
            return problems
        kept.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(kept, json.dumps(problems))
    note_use(kept)
    found: list[str] = json.loads(kept.read_text())
    return found


@functools.cache
def parsed(command: tuple[str | Path, ...], asked: str) -> list[str] | NotAsked:
    """What the program says; why not, where it cannot run: a build for GPUs may not be imported without one."""
    try:
        ended = subprocess.run(
            command, input=asked, capture_output=True, text=True, timeout=PARSER_TIMEOUT_S, check=False
        )
    except subprocess.TimeoutExpired:
        return _unable(f"no answer within {PARSER_TIMEOUT_S:g} s")
    if ended.returncode:
        said = [line.strip() for line in ended.stderr.splitlines() if line.strip()]
        return _unable(shortened(said[-1], REASON_CHARACTERS) if said else f"exit status {ended.returncode}")
    problems: list[str] = json.loads(ended.stdout.splitlines()[-1])
    return problems


def _unable(reason: str) -> NotAsked:
    return NotAsked(
        f"was not checked: its parser does not run here ({reason}); its server says at its start what it does not take"
    )


@dataclass(frozen=True)
class PassedOptions:
    """title: the engine's, in messages. names: of the options that are passed; no other is."""

    title: str
    names: tuple[str, ...]

    def refusals(self, arguments: Mapping[str, JsonValue]) -> Iterator[str]:
        """`OPTION: why`, of those that are passed to no server."""
        for name, value in arguments.items():
            if name not in self.names:
                close = difflib.get_close_matches(name, self.names, n=2)
                meant = f"did you mean {' or '.join(close)}?" if close else f"expected one of {', '.join(self.names)}"
                yield f"{name}: no option that is passed on to {self.title}; {meant}"
            elif value is None or value is False:
                yield f"{name}: found {json.dumps(value)}; leave the option out, or say true for one without a value"

    def written(self, arguments: Mapping[str, JsonValue]) -> dict[str, list[str]]:
        """Option → how the command line has it. Raises RecipeError for one that is refused."""
        if refused := list(self.refusals(arguments)):
            raise RecipeError(f"the arguments of {self.title}: {'; '.join(refused)}")
        return {
            name: [f"--{name}"]
            if value is True
            else [f"--{name}={value if isinstance(value, str) else json.dumps(value)}"]
            for name, value in arguments.items()
        }


def dtype_of(spec: LaunchSpec) -> str:
    """What the recipe says; of `auto`, bfloat16 for weights in float32."""
    stored = read_config(spec.model)
    if spec.serving.dtype == "auto" and "float32" in (stored.get("dtype"), stored.get("torch_dtype")):
        return "bfloat16"
    return spec.serving.dtype


class FixedWeights:
    """Recipes that ask for more are refused by `Capabilities` when they are read; these are the last line."""

    title: str

    def program_in_image(self, *, on_cpu: bool) -> NoReturn:
        raise RecipeError(f"serving with {self.title} in Kubernetes: there is no image of it; serve with vllm")

    def check_adapters(self, spec: LaunchSpec) -> None:
        self._refuse_adapters()

    def has_room(self, spec: LaunchSpec, adapter: Path) -> bool:
        return False

    def load_adapter(self, address: EngineAddress, api_key: str, name: str, folder: Path, timeout_s: float) -> None:
        self._refuse_adapters()

    def unload_adapter(self, address: EngineAddress, api_key: str, name: str, timeout_s: float) -> None:
        self._refuse_adapters()

    def check_takes_weights(self, client: Client, num_tokens: int, dtype: str) -> None:
        self._refuse_reloads()

    def check_reads(self, address: EngineAddress, api_key: str, folder: Path, timeout_s: float) -> None:
        self._refuse_reloads()

    def prepare_reloads(self, folder: Path, client: Client | None = None) -> None:
        self._refuse_reloads()

    def reload_weights(self, address: EngineAddress, api_key: str, folder: Path, timeout_s: float) -> None:
        self._refuse_reloads()

    def check_loadable(
        self, model_config: dict[str, Any], projections: list[Projection], quantization: Quantization
    ) -> None:
        """Nothing is quantized for it, unless it says more of that."""

    def caveats(self, quantization: Quantization) -> list[str]:
        return []

    def _refuse_adapters(self) -> NoReturn:
        raise ModelError(
            f"{self.title} serves no adapters of ours; merge them (`kind: merge`), and serve what comes out"
        )

    def _refuse_reloads(self) -> NoReturn:
        raise ModelError(f"{self.title} loads its weights once; completions to learn from are sampled by vllm")
