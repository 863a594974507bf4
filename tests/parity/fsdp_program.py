"""Test program that trains a few steps with the FSDP engine for each of several cases; `ranks.py` forks its ranks.

    fsdp_program SPEC.json

The spec names `data` (documents of the rows of each global batch), `output` and `cases`: name → {"model": folder,
"config": fields of a TrainConfig}. A case leaves `output/NAME.json` (`losses`, `grad_norms`, `log_probabilities` of the
first row's documents after training), `output/NAME.gradients.safetensors` (of the first step, clipped) and the exported
model in `output/NAME/`. A case may `save` a checkpoint of the state after so many steps, [steps, folder], or go on from
what another has saved so: `resume`.
"""

import json
import sys
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from stages.core.contract import is_main_process
from stages.data.batch import IGNORED, Batch, Documents
from stages.engines.fsdp.engine import FsdpEngine
from stages.engines.fsdp.optimizer import full_tensor
from stages.kinds.train.config import TrainConfig
from stages.kinds.train.methods.sft import SftLoss
from stages.models.facts import ModelFacts
from stages.parallel.processes import joined_processes

Row = list[list[int]]


def main() -> None:
    torch.set_num_threads(1)
    spec = json.loads(Path(sys.argv[1]).read_text())
    with joined_processes() as device:
        for name, case in spec["cases"].items():
            config = TrainConfig.model_validate(case["config"])
            engine = FsdpEngine(ModelFacts(Path(case["model"])), config.engine_settings, device)
            gradients = first_gradients(engine)
            result = train_case(engine, config, spec["data"], case)
            first_row = pack(spec["data"][0][:1])  # also of a case that goes on from later batches
            result["left_whole"] = engine.tags.get("left_whole_by_tp", "")
            result["log_probabilities"] = engine.document_log_probabilities(first_row).tolist()
            engine.export(exported := Path(spec["output"]) / name, torch.float32)
            # To a sampling server, which gets adapters by folder.
            given = None if config.adapter else dict(engine.whole_weights(torch.float32))
            if is_main_process():
                if given is not None:
                    check_equal(given, exported)
                (Path(spec["output"]) / f"{name}.json").write_text(json.dumps(result))
                save_file(gradients, Path(spec["output"]) / f"{name}.gradients.safetensors")


def check_equal(given: dict[str, torch.Tensor], exported: Path) -> None:
    """Check that weights are those of an export, to the bit."""
    written = {name: one for path in exported.glob("*.safetensors") for name, one in load_file(path).items()}
    assert given.keys() == written.keys()
    assert all(torch.equal(given[name], one) for name, one in written.items())


def first_gradients(engine: FsdpEngine) -> dict[str, torch.Tensor]:
    """Return a dict that the first optimizer step fills with the clipped, unsharded gradients by parameter name."""
    gradients: dict[str, torch.Tensor] = {}

    def fill(*_: object) -> None:
        if not gradients:
            named = engine._model.causal_lm.named_parameters()
            gradients.update({name: full_tensor(one.grad).cpu() for name, one in named if one.grad is not None})

    engine._optimizer.register_step_pre_hook(fill)
    return gradients


def train_case(
    engine: FsdpEngine, config: TrainConfig, global_batches: list[list[Row]], case: dict[str, Any]
) -> dict[str, list[float]]:
    if "resume" in case:
        steps, folder = case["resume"]
        engine.load(Path(folder))
        return train(engine, config, global_batches[steps:])
    if "save" not in case:
        return train(engine, config, global_batches)
    steps, folder = case["save"]
    before = train(engine, config, global_batches[:steps])
    engine.save(Path(folder)).result()
    after = train(engine, config, global_batches[steps:])
    return {**after, **{name: before[name] + after[name] for name in ("losses", "grad_norms")}}


def train(engine: FsdpEngine, config: TrainConfig, global_batches: list[list[Row]]) -> dict[str, list[float]]:
    outcomes = []
    for rows in global_batches:
        num_rows = len(rows) // engine.data_parallel_size
        share = rows[engine.data_rank * num_rows :][:num_rows]
        size = config.layout.micro_batch_size
        micro_batches = [pack(share[start : start + size]) for start in range(0, num_rows, size)]
        outcomes.append(engine.train_step(micro_batches, SftLoss(), config.learning_rate, config.max_grad_norm))
    return {
        "losses": [outcome.loss for outcome in outcomes],
        "grad_norms": [outcome.grad_norm for outcome in outcomes],
        "aux_losses": [outcome.measured.get("aux_loss") for outcome in outcomes],
    }


def pack(rows: list[Row]) -> Batch:
    """Pack rows of equally many tokens into a batch; every token but a document's first is a target."""
    documents = [torch.tensor(document) for row in rows for document in row]
    lengths = [len(document) for document in documents]
    targets = torch.cat([torch.cat([document[1:], torch.tensor([IGNORED])]) for document in documents])
    positions = torch.cat([torch.arange(length) for length in lengths])
    numbers = torch.arange(len(documents)).repeat_interleave(torch.tensor(lengths))
    *tensors, ids = (tensor.view(len(rows), -1) for tensor in (torch.cat(documents), targets, positions, numbers))
    return Batch.of(*tensors, Documents(ids, len(documents), lengths))
