"""SGLang as a serving engine: written by its source and checked against its parser, never run here.

What was not seen to work is not promised: it puts no adapters on a model, and gives no weights to a running server.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from pydantic import JsonValue

from stages.models.model_config import read_config
from stages.models.recorded import Predicted
from stages.serving.config import BenchmarkConfig
from stages.serving.engine import Capabilities, LoadResult
from stages.serving.fixed_weights import FixedWeights
from stages.serving.launch import LaunchSpec
from stages.serving.own_parser import NotAsked, problems_by_parser
from stages.serving.sglang.arguments import CHECK, PASSED
from stages.serving.sglang.program import SETTINGS, SglangProgram, find_sglang
from stages.serving.sglang.root_cause import find_root_cause

if TYPE_CHECKING:
    from stages.serving.client import Client  # its HTTP imports would slow every plan

SMOKE_PROMPT = "1 + 1 = 2"


class Sglang(FixedWeights):
    """The parts of this room, as the protocol names them."""

    name = "sglang"
    title = "SGLang"
    installation = "install the package sglang into .venv-sglang, or set LIFECYCLE_SGLANG to an environment's python"
    settings = SETTINGS
    waiting_requests_metric = "sglang:num_queue_reqs"
    listens_on_sockets = False
    capabilities = Capabilities("safetensors", prompt_log_probabilities=True, idle_fields=("kv_cache_memory_gib",))

    def find_program(self) -> SglangProgram:
        return find_sglang()

    def argument_problems(self, arguments: Mapping[str, JsonValue], *, at_once: bool) -> list[str] | NotAsked:
        if refused := list(PASSED.refusals(arguments)):
            return refused
        program = self.find_program()
        command: list[str | Path] = [program.command, "-P", CHECK]
        return problems_by_parser(self.name, program.version, command, PASSED.written(arguments), at_once=at_once)

    def root_cause(self, log: str) -> str | None:
        return find_root_cause(log)

    def context_tokens(self, client: Client, spec: LaunchSpec) -> int:
        return client.context_tokens()

    def smoke_log_probabilities(self, client: Client) -> list[float]:
        choice = client.complete(SMOKE_PROMPT, max_tokens=2, ignore_eos=True, logprobs=1)
        return [math.nan if value is None else value for value in choice.reported(client.url).token_logprobs]

    def predictions(self, client: Client, rows: list[list[int]]) -> list[Predicted]:
        """It names tokens by their texts, of which several may have the same: the likeliest have no ids."""
        reports = zip(rows, client.echoed(rows), strict=True)
        return [Predicted(report.of_prompt(len(row), client.url), ()) for row, report in reports]

    def generate_load(
        self, client: Client, spec: LaunchSpec, benchmark: BenchmarkConfig, folder: Path
    ) -> list[LoadResult]:
        from stages.serving.streamed_load import generate_load

        return generate_load(client, int(read_config(spec.model)["vocab_size"]), benchmark, folder)
