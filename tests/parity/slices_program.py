"""Test program in which two FSDP processes load models, and write their peak host memory or the error.

    slices_program SPEC.json

The spec names `models` (name → folder), `config` (fields of a TrainConfig) and `output`. Every rank leaves
`output/NAME.RANK.json`: `peak_bytes` beyond what there was before, without what the kernel maps of files and can drop,
`shard_bytes` of its weights, and `gathered_bytes` that the compared twin still holds, or `error`.
"""

import gc
import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist

from stages.core.errors import ModelError
from stages.engines.fsdp.engine import FsdpEngine
from stages.engines.fsdp.model import TargetLogProbabilities
from stages.engines.fsdp.parallelize import fsdp_modules
from stages.kinds.train.config import TrainConfig
from stages.models.facts import ModelFacts
from stages.parallel.processes import joined_processes
from tests.peak_memory import watched_memory


def main() -> None:
    torch.set_num_threads(1)
    gc.disable()  # cycles of modules and FSDP's hooks keep a twin until a collection
    spec = json.loads(Path(sys.argv[1]).read_text())
    settings = TrainConfig.model_validate(spec["config"]).engine_settings
    with joined_processes() as device:
        for name, folder in spec["models"].items():
            try:
                found = started(Path(folder), settings, device)
            except ModelError as error:
                found = {"error": str(error)}
            (Path(spec["output"]) / f"{name}.{dist.get_rank()}.json").write_text(json.dumps(found))


def started(folder, settings, device):
    with watched_memory() as peak:
        engine = FsdpEngine(ModelFacts(folder), settings, device)
    weights = engine._model.parameters()
    return {
        "peak_bytes": peak.added,
        "shard_bytes": sum(4 * one.to_local().numel() for one in weights),
        "gathered_bytes": gathered_bytes(engine),
    }


def gathered_bytes(engine):
    """Return the bytes of whole weights that sharded models other than the engine's own hold; collections are off."""
    return sum(
        tensor.untyped_storage().size()
        for model in gc.get_objects()
        if isinstance(model, TargetLogProbabilities) and model is not engine._model
        for module in fsdp_modules(model)
        for group in module._get_fsdp_state()._fsdp_param_groups
        for weight in group.fsdp_params
        for tensor in weight.all_gather_outputs
    )
