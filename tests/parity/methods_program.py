"""Test program that trains a few steps by several methods on the FSDP engine; `ranks.py` forks its ranks.

    methods_program SPEC.json

The spec names the folders `data` (packed rows, of each kind), `model`, `teacher` and `output`, and `cases`: name →
fields of a TrainConfig; `grpo` among them are options of GRPO, whose completions are the labelled rows.
A case leaves `output/NAME.json`, the outcome of each step and of an evaluation, and what it exports in `output/NAME/`.
`megatron_methods_program.py` does the same on Megatron.
"""

import json
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from stages.core.contract import is_main_process
from stages.data.batch import Batch, Candidates, Rollouts
from stages.data.dataset import PackedDataset
from stages.engines.engine import Engine
from stages.engines.fsdp.engine import FsdpEngine
from stages.kinds.train.batches import BatchSource, with_divergence
from stages.kinds.train.config import TrainConfig
from stages.kinds.train.methods.grpo import GrpoConfig, GrpoLoss
from stages.models.facts import ModelFacts
from stages.parallel.processes import joined_processes

NUM_STEPS, VOCABULARY = 2, 64


def main() -> None:
    run_cases(lambda model, config, device: FsdpEngine(ModelFacts(model), config.engine_settings, device))


def run_cases(
    build: Callable[[Path, TrainConfig, torch.device], Engine], end: Callable[[], None] = lambda: None
) -> None:
    torch.set_num_threads(1)
    spec = json.loads(Path(sys.argv[1]).read_text())
    output = Path(spec["output"])
    with joined_processes() as device:
        for name, fields in spec["cases"].items():
            grpo = fields.pop("grpo", None)
            config = TrainConfig.model_validate_json(json.dumps(fields))
            dataset = PackedDataset(Path(spec["data"]) / ("labelled" if grpo else config.learning.rows))
            taught = ask(build, Path(spec["teacher"]), config, device, dataset) if config.teacher_tokens else None
            engine = build(Path(spec["model"]), config, device)
            found = train(engine, config, dataset, taught, grpo and GrpoLoss(GrpoConfig(**grpo)))
            engine.export(output / name, torch.float32)
            if is_main_process():
                (output / f"{name}.json").write_text(json.dumps(found))
            end()


def ask(
    build: Callable[[Path, TrainConfig, torch.device], Engine],
    folder: Path,
    config: TrainConfig,
    device: torch.device,
    dataset: PackedDataset,
) -> list[Batch]:
    """Return this process's micro-batches with the teacher's most probable tokens added, for distillation."""
    asked = config.teacher_tokens
    assert asked
    teacher = build(folder, config.model_copy(update={"adapter": None}), device)
    taught = []
    for batch in micro_batches(teacher, config, dataset):
        tempered = batch.with_signal(temperature=asked.temperature)
        said = teacher.likeliest_tokens(tempered, asked.number)
        taught.append(tempered.with_signal(candidates=Candidates(*said, asked.number == VOCABULARY)))
    teacher.close()
    return taught


def micro_batches(engine: Engine, config: TrainConfig, dataset: PackedDataset) -> list[Batch]:
    size = config.layout.micro_batch_size
    source = BatchSource(dataset, size, config.learning.batch_change(config.method_options))
    rows = own_rows(engine, dataset)
    return [source.batch(rows[start : start + size]) for start in range(0, len(rows), size)]


def own_rows(engine: Engine, dataset: PackedDataset) -> range:
    num_rows = len(dataset) // engine.data_parallel_size
    return range(engine.data_rank * num_rows, (engine.data_rank + 1) * num_rows)


def train(
    engine: Engine,
    config: TrainConfig,
    dataset: PackedDataset,
    taught: list[Batch] | None = None,
    grpo: GrpoLoss | None = None,
) -> list[dict[str, Any]]:
    """Train all steps on the same rows, then evaluate on them; return the outcome of each."""
    batches = taught or micro_batches(engine, config, dataset)
    if config.needs_reference:
        batches = [batch.with_reference(engine.document_log_probabilities(batch)) for batch in batches]
    if config.needs_divergence:
        rows, size = own_rows(engine, dataset), config.layout.micro_batch_size
        others = [dataset.mismatched(rows[start : start + size]) for start in range(0, len(rows), size)]
        others = [other.with_reference(engine.document_log_probabilities(other)) for other in others]
        batches = [batch.with_signal(mismatched=other) for batch, other in zip(batches, others, strict=True)]
    if grpo:
        batches = [with_rollouts(batch, engine.predictions(batch)[0]) for batch in batches]
    loss = grpo or config.learning.build_loss(config.method_options)
    steps = [
        engine.train_step(with_divergence(engine, batches), loss, config.learning_rate, config.max_grad_norm)
        for _ in range(NUM_STEPS)
    ]
    return [asdict(outcome) for outcome in (*steps, engine.evaluate(with_divergence(engine, batches), loss))]


def with_rollouts(batch: Batch, old: torch.Tensor) -> Batch:
    """Turn labelled rows into GRPO completions: advantages by label, made-up log-probabilities of a server."""
    assert batch.signal.is_good is not None
    noise = batch.inputs.input_ids.sin().where(batch.signal.has_target, 0.0)
    advantages = torch.where(batch.signal.is_good, 1.0, -0.5)
    return batch.with_signal(rollouts=Rollouts(advantages, old, old + 0.3 * noise, old - 0.2 * noise))
