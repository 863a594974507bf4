"""LMDeploy as a serving engine: written by its source and checked against its parser, never run here.

Its `/v1/completions` takes a list of token ids for a list of prompts, and gives no log-probabilities; chats take ids,
and give those of what was generated. So prompts are texts, and what it serves is compared with no record of training.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import JsonValue

from stages.core.errors import ServerError
from stages.models.model_config import read_config
from stages.models.recorded import Predicted
from stages.serving.config import BenchmarkConfig
from stages.serving.engine import Capabilities, LoadResult
from stages.serving.fixed_weights import FixedWeights
from stages.serving.launch import LaunchSpec
from stages.serving.lmdeploy.arguments import CHECK, PASSED
from stages.serving.lmdeploy.program import SETTINGS, LmdeployProgram, context_tokens, find_lmdeploy
from stages.serving.lmdeploy.root_cause import find_root_cause
from stages.serving.own_parser import NotAsked, problems_by_parser

if TYPE_CHECKING:
    from stages.serving.client import Client  # its HTTP imports would slow every plan

CHAT = "/v1/chat/completions"
SMOKE_PROMPT = [*range(4)]


class Lmdeploy(FixedWeights):
    """The parts of this room, as the protocol names them."""

    name = "lmdeploy"
    title = "LMDeploy"
    installation = "install the package lmdeploy into .venv-lmdeploy, or set LIFECYCLE_LMDEPLOY to its python"
    settings = SETTINGS
    waiting_requests_metric = "lmdeploy:num_requests_waiting"
    listens_on_sockets = False
    capabilities = Capabilities(
        "safetensors",
        token_prompts=False,
        stop_texts=False,
        dtypes=("bfloat16", "float16"),
        idle_fields=("kv_cache_memory_gib",),
    )

    def find_program(self) -> LmdeployProgram:
        return find_lmdeploy()

    def argument_problems(self, arguments: Mapping[str, JsonValue], *, at_once: bool) -> list[str] | NotAsked:
        if refused := list(PASSED.refusals(arguments)):
            return refused
        program = self.find_program()
        command: list[str | Path] = [program.command, "-P", CHECK]
        return problems_by_parser(self.name, program.version, command, PASSED.written(arguments), at_once=at_once)

    def root_cause(self, log: str) -> str | None:
        return find_root_cause(log)

    def context_tokens(self, client: Client, spec: LaunchSpec) -> int:
        return context_tokens(spec)

    def smoke_log_probabilities(self, client: Client) -> list[float]:
        """By a chat of token ids, which needs no chat template."""
        from stages.serving.completions import ChatChoice, Choices

        options = {"temperature": 0, "max_tokens": 2, "ignore_eos": True, "logprobs": True}
        request = {"model": client.model, **_asked_by_ids(SMOKE_PROMPT), **options}
        choice = client.answer(CHAT, Choices[ChatChoice], request).choices[0]
        if not (choice.logprobs and choice.logprobs.content):
            raise ServerError(f"{client.url} gives no log-probabilities of what it generated")
        return [token.logprob for token in choice.logprobs.content]

    def predictions(self, client: Client, rows: list[list[int]]) -> list[Predicted]:
        raise ServerError(f"{self.title} predicts no given tokens")

    def generate_load(
        self, client: Client, spec: LaunchSpec, benchmark: BenchmarkConfig, folder: Path
    ) -> list[LoadResult]:
        from stages.serving.streamed_load import generate_load

        vocabulary = int(read_config(spec.model)["vocab_size"])
        return generate_load(client, vocabulary, benchmark, folder, CHAT, _asked_by_ids)


def _asked_by_ids(prompt: list[int]) -> dict[str, Any]:
    """Of a chat: without messages, it answers to token ids."""
    return {"messages": [], "input_ids": prompt}
