"""Test program that trains an adapter with DPO on the FSDP engine under several layouts; `ranks.py` forks its ranks.

    adapter_dpo_program SPEC.json

The spec names `model`, `output`, `num_steps`, `pairs` (each two documents: token ids, and 1 for those that are learned)
and `cases`: name → fields of a TrainConfig. A case leaves `output/NAME.json` (loss of each step),
`output/NAME.gradients.safetensors` (of the first step, clipped) and the adapter in `output/NAME/`.
"""

import json
import sys
from pathlib import Path

import torch
from safetensors.torch import save_file

from stages.core.contract import is_main_process
from stages.engines.fsdp.engine import FsdpEngine
from stages.kinds.train.config import TrainConfig
from stages.models.facts import ModelFacts
from stages.parallel.processes import joined_processes
from tests.parity.fsdp_program import first_gradients
from tests.unit.stages.kinds.train.methods.against_trl import packed


def main() -> None:
    torch.set_num_threads(1)
    spec = json.loads(Path(sys.argv[1]).read_text())
    output = Path(spec["output"])
    with joined_processes() as device:
        for name, fields in spec["cases"].items():
            config = TrainConfig.model_validate(fields)
            engine = FsdpEngine(ModelFacts(Path(spec["model"])), config.engine_settings, device)
            gradients = first_gradients(engine)
            losses = train(engine, config, spec["pairs"], spec["num_steps"])
            engine.export(output / name, torch.float32)
            if is_main_process():
                (output / f"{name}.json").write_text(json.dumps(losses))
                save_file(gradients, output / f"{name}.gradients.safetensors")


def train(engine: FsdpEngine, config: TrainConfig, pairs: list[list[list[list[int]]]], num_steps: int) -> list[float]:
    """Train with DPO on the same pairs, the reference being the adapter before training; return the losses."""
    num_own = len(pairs) // engine.data_parallel_size
    own = pairs[engine.data_rank * num_own :][:num_own]
    documents = [document for pair in own for document in pair]
    batch = packed(
        [torch.tensor(ids) for ids, _ in documents], [torch.tensor(learned).bool() for _, learned in documents]
    )
    batch = batch.with_reference(engine.document_log_probabilities(batch))
    loss = config.learning.build_loss(config.method_options)
    steps = (engine.train_step([batch], loss, config.learning_rate, config.max_grad_norm) for _ in range(num_steps))
    return [outcome.loss for outcome in steps]
