"""Options of `vllm serve` in a recipe's `serving.arguments`: refused ones, and the command line of the others.

Refused are options that this project sets itself, that open a way around the proxy or run code of others, and that name
files or servers whose content no version would know.
"""

import json
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from pydantic import JsonValue

from stages.core.errors import RecipeError
from stages.models.media import KINDS, MediaKind, TakenFrames
from stages.serving.config import Speculation, SpeculationMethod
from stages.serving.engine import LaunchSpec, UncheckedOptions, problems_by_parser
from stages.serving.vllm.tool_parsers import known_parsers, parser_problem

NAME = re.compile(r"[a-z0-9]+(-[a-z0-9]+)*")
SET_HERE = {
    "model": "it is the stage's",
    "served-model-name": "it is the stage's",
    "host": "say execution.host",
    "port": "say execution.port",
    "dtype": "say serving.dtype",
    "tensor-parallel-size": "say serving.tensor_parallel_size",
    "max-model-len": "say serving.max_model_len",
    "max-num-seqs": "say serving.max_num_seqs",
    "kv-cache-memory-bytes": "say serving.kv_cache_memory_gib",
    "enforce-eager": "say serving.enforce_eager",
    "trust-remote-code": "say serving.trust_remote_code",
    "limit-mm-per-prompt": "say serving.max_images",
    **dict.fromkeys(
        ("speculative-config", "spec-method", "spec-model", "spec-tokens"),
        "say `speculative` in the serve stage: ngram, mtp, or {draft: STAGE}",
    ),
    **dict.fromkeys(
        ("enable-lora", "lora-modules", "max-lora-rank", "max-loras", "lora-target-modules"), "name adapters as stages"
    ),
    **dict.fromkeys(
        ("uds", "generation-config", "logprobs-mode", "distributed-executor-backend"), "it is set where it is needed"
    ),
}
"""vLLM options that other recipe fields set, with the field to use instead."""
DOORS = {
    **dict.fromkeys(
        (
            *("api-key", "api-server-count", "grpc", "grpc-port", "headless", "root-path", "middleware", "tool-server"),
            *("allow-credentials", "allowed-origins", "allowed-methods", "allowed-headers", "config", "hf-token"),
            *("ssl-keyfile", "ssl-certfile", "ssl-ca-certs", "ssl-cert-reqs", "ssl-ciphers", "enable-ssl-refresh"),
            *("allowed-local-media-path", "allowed-media-domains", "trust-request-chat-template"),
            *("trust-request-mm-kwargs", "enable-prompt-embeds", "enable-mm-embeds", "enable-log-requests"),
            *("enable-log-outputs", "enable-log-deltas", "otlp-traces-endpoint", "kv-events-config"),
            *("kv-transfer-config", "ec-transfer-config", "weight-transfer-config", "profiler-config"),
            *("master-addr", "master-port", "nnodes", "node-rank", "data-parallel-address", "data-parallel-rpc-port"),
            *("data-parallel-supervisor-port", "enable-elastic-ep", "enable-sleep-mode", "enable-scale-out"),
        ),
        "it would open a door past the proxy, or let requests or secrets out",
    ),
    **dict.fromkeys(
        (
            *("worker-cls", "worker-extension-cls", "scheduler-cls", "logits-processors", "model-class-overrides"),
            *("io-processor-plugin", "tool-parser-plugin", "reasoning-parser-plugin", "additional-config"),
            *("load-format", "model-loader-extra-config", "logging-config", "log-config-file"),
        ),
        "it would run code of others, or load weights that are no safetensors",
    ),
    **dict.fromkeys(
        (
            *("chat-template", "tokenizer", "hf-config-path", "hf-overrides", "config-format", "default-mm-loras"),
            *("mm-processor-kwargs", "media-io-kwargs", "language-model-only"),
            *("revision", "code-revision", "tokenizer-revision", "download-dir"),
        ),
        "the model is what its folder holds, and what lies elsewhere is in no version",
    ),
}
"""vLLM options that are refused because they open a way to foreign code, files or networks, with the reason."""
REFUSED = {**{name: f"it is set by the recipe's other fields: {where}" for name, where in SET_HERE.items()}, **DOORS}
ELSEWHERE = re.compile(
    r".*_(plugin|cls|class|path|dir|file|url|endpoint)|inductor_passes|model|tokenizer|(.*_)?revision|custom_class"
)
"""Pattern of keys and methods in a vLLM option's value that refer to code, files or models outside the artifact."""
QUALIFIED = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)+")
"""Pattern of the dotted name of a Python object, which vLLM's `compilation-config` would import as its `backend`."""
PARSER = "tool-call-parser"
SPECULATION: dict[SpeculationMethod, dict[str, JsonValue]] = {
    "ngram": {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 4},
    # One layer guesses one token; it may be run again on its own output, but was not trained to be.
    "mtp": {"method": "mtp", "num_speculative_tokens": 1},
    "draft": {"method": "draft_model", "num_speculative_tokens": 3},
}
"""vLLM's options by speculation method; each token guessed in vain costs a part of the model's next step."""
NOWHERE = "none.invalid"
"""The only host from which vLLM may fetch media: one that cannot be (RFC 6761). An empty list would allow all."""
CHECK = Path(__file__).with_name("option_check.py")


def written(arguments: Mapping[str, JsonValue]) -> dict[str, list[str]]:
    """Return the command-line arguments of each vLLM option, by name. Raises RecipeError if one is refused."""
    if refused := list(refusals(arguments)):
        raise RecipeError(f"the arguments of `vllm serve`: {'; '.join(refused)}")
    return {name: _written(name, value) for name, value in arguments.items()}


def refusals(arguments: Mapping[str, JsonValue]) -> Iterator[str]:
    """Yield `OPTION: reason` for each option in a recipe that may not be passed to vLLM."""
    for name, value in arguments.items():
        # vLLM's parser takes an unambiguous beginning of an option for the option.
        whole = next((refused for refused in REFUSED if refused.startswith(name)), None)
        if not NAME.fullmatch(name) or name.startswith("no-"):
            yield f"{name}: expected an option's name without dashes before it, such as max-num-batched-tokens: 2048"
        elif whole:
            yield f"{name}: {REFUSED[whole]}"
        elif found := sorted(set(_elsewhere(value))):
            yield f"{name}: {', '.join(found)} names what is in no version"
        elif isinstance(value, list) and any(str(item).startswith("-") for item in value):
            yield f"{name}: found {value}, expected items that begin with no dash"
        elif value is None:
            yield f"{name}: has no value; say true for an option without one"


def speculation_arguments(speculation: Speculation | None) -> list[str]:
    """Return the command-line arguments by which vLLM guesses tokens ahead; none if it does not."""
    if speculation is None:
        return []
    draft = {"model": str(speculation.draft)} if speculation.draft else {}
    return ["--speculative-config", json.dumps({**SPECULATION[speculation.method], **draft})]


def _video_arguments(frames: TakenFrames) -> list[str]:
    return [
        # vLLM takes the frames; the processor, whose files say that it does so, would take some of these.
        *("--media-io-kwargs", json.dumps({"video": vars(frames)})),
        *("--mm-processor-kwargs", json.dumps({"do_sample_frames": False})),
        # Else the tower would subtract the mean of pictures from videos, whose processor has its own.
        "--no-mm-device-do-normalize",
    ]


OF_KINDS: dict[MediaKind, Callable[[Any], list[str]]] = {"video": _video_arguments}
"""Functions by kind that return vLLM's arguments for what a model takes of such media."""


def media_arguments(spec: LaunchSpec) -> list[str]:
    """Return the command-line arguments of a model that sees: media inside of requests, and nothing fetched.

    Their sizes are bounded as in training, by the processor's files in the model's folder; so is the rate of frames.
    """
    if not spec.max_images:
        return []
    limits = spec.limits
    rate = [option for kind, options in OF_KINDS.items() if limits.of(kind) for option in options(limits.taken[kind])]
    # The last one is for us alone, as the proxy passes no such request on: prompts of token ids and pictures.
    return [
        *("--limit-mm-per-prompt", json.dumps({kind: limits.of(kind) for kind in KINDS}), *rate),
        *("--allowed-media-domains", NOWHERE, "--enable-scale-out"),
    ]


def argument_problems(
    python: Path, version: str, arguments: Mapping[str, JsonValue], *, at_once: bool = False
) -> list[str] | UncheckedOptions:
    """Return `OPTION: reason` for options that this project or the parser of the installed vLLM refuses.

    The parser's answers are cached. python: of vLLM's environment. at_once: only answer from the cache.
    """
    if refused := list(refusals(arguments)):
        return refused
    # The option parser accepts any name of a tool parser; the server would end with an error.
    if PARSER in arguments and (problem := parser_problem(arguments[PARSER], python)):
        return [f"{PARSER}: {problem}"]
    if set(arguments) == {PARSER} and known_parsers(python):
        return []
    return problems_by_parser("vllm", version, [python, "-P", CHECK], written(arguments), at_once=at_once)


def _written(name: str, value: JsonValue) -> list[str]:
    if isinstance(value, bool):
        return [f"--{name}" if value else f"--no-{name}"]
    if isinstance(value, list):
        return [f"--{name}", *(item if isinstance(item, str) else json.dumps(item) for item in value)]
    return [f"--{name}={value if isinstance(value, str) else json.dumps(value)}"]


def _elsewhere(value: JsonValue) -> Iterator[str]:
    """Yield keys and methods in an option's (nested) value that name code, files or models outside the artifact."""
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except ValueError:
            return
    if isinstance(value, list):
        for item in value:
            yield from _elsewhere(item)
    if isinstance(value, dict):
        yield from (name for name in (*value, str(value.get("method"))) if ELSEWHERE.fullmatch(name))
        if QUALIFIED.fullmatch(str(value.get("backend"))):
            yield "backend"
        for item in value.values():
            yield from _elsewhere(item)
