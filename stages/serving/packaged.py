"""SGLang and LMDeploy as serving engines: one class, and a table of what differs for each.

Written from their sources (SGLang 0.5.23, LMDeploy 0.18.0) and checked against their own argument parsers; no server of
either was ever run here. So neither puts adapters on a model, nor takes new weights while it runs. Each environment's
interpreter runs `packaged_program.py`.
"""

from __future__ import annotations

import difflib
import json
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import JsonValue

from stages.core.errors import ModelError, RecipeError, ServerError
from stages.models.recorded import Predicted
from stages.serving.config import BenchmarkConfig
from stages.serving.engine import (
    Capabilities,
    FixedWeights,
    LaunchSpec,
    LoadResult,
    UncheckedOptions,
    dtype_of,
    problems_by_parser,
)
from stages.serving.interpreter import find_interpreter, inherited_environment, root_cause

if TYPE_CHECKING:  # their HTTP imports would slow every plan
    from stages.serving.backend import EngineAddress
    from stages.serving.client import Client

PROGRAM = Path(__file__).with_name("packaged_program.py")
CHECK = "--check-options"
"""Argument by which the program checks options with the engine's own parser instead of starting a server."""
QUIET = {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "PYTHONUNBUFFERED": "1"}
CHAT = "/v1/chat/completions"
SHARED_OPTIONS = {"dtype": "--dtype", "tool_call_parser": "--tool-call-parser"}
CONSEQUENCES = (
    *("died during initialization", "worker failed", "engine loop failed"),
    *("cancellederror", "systemexit", "keyboardinterrupt"),
)
"""Phrases, in lower case, of exceptions in a log that only follow from others."""
OUT_OF_MEMORY = (
    "lower serving.arguments.{} or serving.max_num_seqs, or share the layers by serving.tensor_parallel_size"
)


@dataclass(frozen=True)
class PackagedProgram:
    """Installed engine: the Python interpreter of its environment, and its package's version."""

    engine: PackagedEngine
    command: Path
    version: str

    def server_command(self, spec: LaunchSpec, address: EngineAddress) -> list[str]:
        serving, engine = spec.serving, self.engine
        values = {
            "served_name": spec.own_name,
            "host": "127.0.0.1",
            "port": address.port,
            "dtype": dtype_of(spec),
            "tensor_parallel_size": serving.tensor_parallel_size,
            "max_model_len": engine.max_model_len(spec),
            "max_num_seqs": serving.max_num_seqs,
            "tool_call_parser": serving.tool_call_parser,
        }
        command = [str(self.command), "-P", str(PROGRAM), engine.name, *engine.before_model, str(spec.model)]
        command += [part for name, value in values.items() if value for part in (engine.options[name], str(value))]
        command += engine.fixed_options
        command += engine.eager_options if serving.enforce_eager else ()
        command += ["--trust-remote-code"] if serving.trust_remote_code else []
        return [*command, *(part for parts in engine.written(serving.arguments).values() for part in parts)]

    def server_environment(self, spec: LaunchSpec, api_key: str) -> dict[str, str]:
        key = {f"{self.engine.name.upper()}_SERVER_KEY": api_key}
        return {**inherited_environment(), **self.engine.settings, **key}


@dataclass(eq=False, kw_only=True)
class PackagedEngine(FixedWeights):
    """Serving engine that comes as a Python package with an HTTP server; an instance describes its options.

    before_model: option that precedes the model's folder; empty where that is a positional argument. options: setting →
    the engine's option. fixed_options: of every server. eager_options: that keep it from compiling and from capturing
    graphs. passed: tuning options that a recipe may pass; the others load weights that are no safetensors, run code of
    others, name files that no version knows, or open ways around the proxy. reports_context: whether its server reports
    the context length; else the command line always has it. log_prefix: text before each line of its log. cures: text
    of a cause in the log → what to change.
    """

    name: str
    title: str
    settings: Mapping[str, str]
    waiting_requests_metric: str
    listens_on_sockets: bool = False
    capabilities: Capabilities
    before_model: tuple[str, ...] = ()
    options: Mapping[str, str]
    fixed_options: tuple[str, ...]
    eager_options: tuple[str, ...]
    passed: tuple[str, ...]
    reports_context: bool = True
    log_prefix: re.Pattern[str]
    cures: Mapping[str, str]

    @property
    def installation(self) -> str:
        return (
            f"install the package {self.name} into .venv-{self.name}, or set LIFECYCLE_{self.name.upper()} to an "
            "environment's python"
        )

    def find_program(self) -> PackagedProgram:
        environment, variable = f".venv-{self.name}", f"LIFECYCLE_{self.name.upper()}"
        how = f"python -m venv {environment} && {environment}/bin/pip install {self.name}"
        found = find_interpreter(self.name, title=self.title, variable=variable, environment=environment, how=how)
        return PackagedProgram(self, *found)

    def argument_problems(self, arguments: Mapping[str, JsonValue], *, at_once: bool) -> list[str] | UncheckedOptions:
        if refused := list(self.refusals(arguments)):
            return refused
        program = self.find_program()
        command: list[str | Path] = [program.command, "-P", PROGRAM, self.name, CHECK]
        return problems_by_parser(self.name, program.version, command, self.written(arguments), at_once=at_once)

    def refusals(self, arguments: Mapping[str, JsonValue]) -> Iterator[str]:
        """Yield `OPTION: reason` for each option that is not on the allow-list or has no valid value."""
        for name, value in arguments.items():
            if name not in self.passed:
                close = difflib.get_close_matches(name, self.passed, n=2)
                meant = f"did you mean {' or '.join(close)}?" if close else f"expected one of {', '.join(self.passed)}"
                yield f"{name}: no option that is passed on to {self.title}; {meant}"
            elif value is None or value is False:
                yield f"{name}: found {json.dumps(value)}; leave the option out, or say true for one without a value"

    def written(self, arguments: Mapping[str, JsonValue]) -> dict[str, list[str]]:
        """Return the command-line arguments of each option, by name. Raises RecipeError if an option is refused."""
        if refused := list(self.refusals(arguments)):
            raise RecipeError(f"the arguments of {self.title}: {'; '.join(refused)}")
        return {
            name: [f"--{name}"]
            if value is True
            else [f"--{name}={value if isinstance(value, str) else json.dumps(value)}"]
            for name, value in arguments.items()
        }

    def root_cause(self, log: str) -> str | None:
        usage = re.compile(rf"^(?:{self.name} serve|{PROGRAM.name})\b.*?: error: (.+)")
        return root_cause(log, prefix=self.log_prefix, usage=usage, generic=CONSEQUENCES, cures=self.cures)

    def max_model_len(self, spec: LaunchSpec) -> int | None:
        """Return the context length for the server's command line; None leaves the choice to the engine.

        Raises ModelError where neither the recipe nor the model's config gives one that the server does not report.
        """
        length = spec.serving.max_model_len
        if length or self.reports_context:
            return length
        if spec.facts.max_positions is None:
            raise ModelError(
                f"serving {spec.model} with {self.title}: its config.json has no max_position_embeddings; say how many "
                "tokens a prompt and its answer may have (`serving.max_model_len`)"
            )
        return spec.facts.max_positions

    def context_tokens(self, client: Client, spec: LaunchSpec) -> int:
        chosen = None if self.reports_context else self.max_model_len(spec)
        return chosen or client.context_tokens()

    def smoke_log_probabilities(self, client: Client) -> list[float]:
        """Return the log-probabilities of a short answer; a chat's prompt is token ids, which need no chat template."""
        from stages.serving.client import ChatChoice, Choices

        if self.capabilities.token_prompts:
            choice = client.complete("1 + 1 = 2", max_tokens=2, ignore_eos=True, logprobs=1)
            return [math.nan if value is None else value for value in choice.reported(client.url).token_logprobs]
        options = {"temperature": 0, "max_tokens": 2, "ignore_eos": True, "logprobs": True}
        request = {"model": client.model, **_chat_of_ids([*range(4)]), **options}
        chat = client.answer(CHAT, Choices[ChatChoice], request).choices[0]
        if not (chat.logprobs and chat.logprobs.content):
            raise ServerError(f"{client.url} gives no log-probabilities of what it generated")
        return [token.logprob for token in chat.logprobs.content]

    def predictions(self, client: Client, rows: list[list[int]]) -> list[Predicted]:
        """Return log-probabilities of given tokens, without the likeliest, which SGLang names by ambiguous texts."""
        if not self.capabilities.prompt_log_probabilities:
            raise ServerError(f"{self.title} predicts no given tokens")
        reports = zip(rows, client.echoed(rows), strict=True)
        return [Predicted(report.of_prompt(len(row), client.url), ()) for row, report in reports]

    def generate_load(
        self, client: Client, spec: LaunchSpec, benchmark: BenchmarkConfig, folder: Path
    ) -> list[LoadResult]:
        from stages.serving.streamed_load import generate_load

        route = () if self.capabilities.token_prompts else (CHAT, _chat_of_ids)
        return generate_load(client, int(spec.facts.config["vocab_size"]), benchmark, folder, *route)


def _chat_of_ids(prompt: list[int]) -> dict[str, Any]:
    """Return the fields of a chat request whose prompt is token ids: LMDeploy takes them where `messages` is empty."""
    return {"messages": [], "input_ids": prompt}


SGLANG = PackagedEngine(
    name="sglang",
    title="SGLang",
    settings=QUIET,
    waiting_requests_metric="sglang:num_queue_reqs",
    capabilities=Capabilities("safetensors", prompt_log_probabilities=True, idle_fields=("kv_cache_memory_gib",)),
    before_model=("--model-path",),
    options={
        **SHARED_OPTIONS,
        "served_name": "--served-model-name",
        "host": "--host",
        "port": "--port",
        "tensor_parallel_size": "--tp-size",
        "max_model_len": "--context-length",
        "max_num_seqs": "--max-running-requests",
    },
    # At its usual level it logs all of its settings, the key among them.
    fixed_options=("--enable-metrics", "--load-format", "safetensors", "--log-level", "warning"),
    eager_options=("--cuda-graph-backend-decode=disabled", "--cuda-graph-backend-prefill=disabled"),
    passed=(
        *("attention-backend", "sampling-backend", "grammar-backend", "quantization", "kv-cache-dtype"),
        *("page-size", "mem-fraction-static", "max-total-tokens", "max-prefill-tokens", "chunked-prefill-size"),
        *("enable-mixed-chunk", "schedule-policy", "schedule-conservativeness", "num-continuous-decode-steps"),
        *("disable-overlap-schedule", "disable-radix-cache", "radix-eviction-policy"),
        *("enable-deterministic-inference", "enable-fp32-lm-head", "cuda-graph-max-bs-decode"),
        *("cuda-graph-max-bs-prefill", "enable-torch-compile", "disable-custom-all-reduce", "dp-size", "ep-size"),
        *("pp-size", "random-seed", "watchdog-timeout", "reasoning-parser", "tool-call-parser"),
        *("speculative-algorithm", "speculative-num-steps", "speculative-eagle-topk"),
        *("speculative-num-draft-tokens", "speculative-ngram-max-trie-depth", "speculative-ngram-capacity"),
    ),
    # Such as `[2026-11-23 10:00:00 TP0] Scheduler hit an exception: Traceback (most recent call last):`.
    log_prefix=re.compile(r"^\[\d{4}-\d\d-\d\d \d\d:\d\d:\d\d[^\]]*\]\s?(?:Scheduler hit an exception: )?"),
    cures={
        "Not enough memory. Please try to increase --mem-fraction-static": (
            "the weights leave no room for keys and values; raise serving.arguments.mem-fraction-static, or share "
            "the layers by serving.tensor_parallel_size"
        ),
        "out of memory": OUT_OF_MEMORY.format("mem-fraction-static"),
    },
)
"""SGLang: it scores prompts, but names tokens by text instead of by id."""

LMDEPLOY = PackagedEngine(
    name="lmdeploy",
    title="LMDeploy",
    settings={**QUIET, "RAY_USAGE_STATS_ENABLED": "0", "UVICORN_LOG_LEVEL": "warning"},
    waiting_requests_metric="lmdeploy:num_requests_waiting",
    capabilities=Capabilities(
        "safetensors",
        token_prompts=False,
        stop_texts=False,
        dtypes=("bfloat16", "float16"),
        idle_fields=("kv_cache_memory_gib",),
    ),
    options={
        **SHARED_OPTIONS,
        "served_name": "--model-name",
        "host": "--server-name",
        "port": "--server-port",
        "tensor_parallel_size": "--tp",
        "max_model_len": "--session-len",
        "max_num_seqs": "--max-batch-size",
    },
    # Without a mode, the PyTorch backend refuses requests for log-probabilities.
    fixed_options=("--disable-fastapi-docs", "--logprobs-mode", "raw_logprobs"),
    eager_options=("--eager-mode",),
    passed=(
        *("backend", "model-format", "quant-policy", "cache-max-entry-count", "cache-block-seq-len"),
        *("num-gpu-blocks", "enable-prefix-caching", "max-prefill-token-num", "num-tokens-per-iter"),
        *("max-prefill-iters", "rope-scaling-factor", "communicator", "cp", "ep", "enable-microbatch"),
        *("max-concurrent-requests", "reasoning-parser", "tool-call-parser", "speculative-algorithm"),
        "speculative-num-draft-tokens",
    ),
    reports_context=False,
    # Such as `2026-11-24 10:00:00,123 - lmdeploy - ERROR - base.py:45 - RuntimeError: no GPU`.
    log_prefix=re.compile(r"^\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3} - \w+ - (?:ERROR|CRITICAL) - \S+ - "),
    cures={
        "out of memory": OUT_OF_MEMORY.format("cache-max-entry-count"),
        "ompressed-tensors": (
            "LMDeploy reads int4 weights only, of few group sizes; serve this model with `engine: vllm`"
        ),
    },
)
"""LMDeploy: only its chat route takes token ids and returns log-probabilities.

Its `/v1/completions` takes a list of token ids for a list of prompts. So prompts are texts, and what it serves is
compared with no record of training.
"""
