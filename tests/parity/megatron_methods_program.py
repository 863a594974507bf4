"""Test program that trains a few steps by several methods on the Megatron engine; `ranks.py` forks its ranks."""

from pathlib import Path

import torch
from megatron.core import parallel_state

from stages.engines.megatron.compat import prepare_megatron
from stages.kinds.train.config import TrainConfig
from stages.models.facts import ModelFacts
from tests.parity.methods_program import run_cases

prepare_megatron()
from stages.engines.megatron.engine import MegatronEngine  # noqa: E402


def main() -> None:
    run_cases(build, parallel_state.destroy_model_parallel)


def build(model: Path, config: TrainConfig, device: torch.device) -> MegatronEngine:
    return MegatronEngine(ModelFacts(model), config.engine_settings, device)
