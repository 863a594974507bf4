"""Test program that loads, exports, saves and restores Megatron models under many layouts. `ranks.py` forks its ranks.

    megatron_state_program SPEC.json

The spec names `models` and `output` (folders) and what is to be done, any of
    round_trips   [model, layout] …: export what was loaded to `output/PROCESSES-INDEX`
    memory        {model, layout, shard_bytes}: host memory that reading and writing take → `output/memory.json`
    journeys      {model, from, checkpoint, to, adapter}: train, save and go on under `from` (None: it is there);
                  restore and go on under each of `to`; `from` and `to` are [engine, layout, precision]
                  → `output/journeys.json`
    misfit        [model, checkpoint]: the error of restoring what another model has saved → `output/misfit.txt`
"""

import json
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from stages.core.contract import is_main_process
from stages.core.errors import ModelError
from stages.engines import export
from stages.engines.megatron.compat import prepare_megatron
from stages.kinds.train.config import TrainConfig
from stages.kinds.train.methods.sft import SftLoss
from stages.models.facts import ModelFacts
from stages.models.shape import ModelShape
from stages.parallel.processes import joined_processes
from tests.parity.fsdp_program import check_equal, pack
from tests.parity.megatron_cases import EPSILON, LEARNING_RATE, NUM_ROWS, WEIGHT_DECAY, global_batches
from tests.peak_memory import anonymous_bytes, watched_memory

prepare_megatron()
from stages.engines.fsdp.engine import FsdpEngine  # noqa: E402
from stages.engines.megatron.engine import MegatronEngine  # noqa: E402
from stages.engines.megatron.model import build_model_chunks  # noqa: E402
from stages.engines.megatron.parallel import start_model_parallel  # noqa: E402
from stages.engines.megatron.weights import export_weights, load_weights, whole_weights  # noqa: E402

NUM_STEPS_BEFORE = 2


def main() -> None:
    torch.set_num_threads(1)
    spec = json.loads(Path(sys.argv[1]).read_text())
    models, output = Path(spec["models"]), Path(spec["output"])
    with joined_processes() as device:
        for index, (model, layout) in enumerate(spec.get("round_trips", [])):
            round_trip(models / model, layout, output / f"{dist.get_world_size()}-{index}", device)
        if "memory" in spec:
            export.MAX_SHARD_BYTES = spec["memory"]["shard_bytes"]
            used = measure(models / spec["memory"]["model"], spec["memory"]["layout"], output / "measured", device)
            leave(output / "memory.json", json.dumps(used))
        if "journeys" in spec:
            found = [travel(models / journey["model"], journey, device) for journey in spec["journeys"]]
            leave(output / "journeys.json", json.dumps(found))
        if "misfit" in spec:
            leave(output / "misfit.txt", misfit(models / spec["misfit"][0], Path(spec["misfit"][1]), device))


def leave(path: Path, text: str) -> None:
    if is_main_process():
        path.write_text(text)


def round_trip(model: Path, layout: dict[str, Any], folder: Path, device: torch.device) -> None:
    chunks, shape = build(model, layout, device)
    load_weights(chunks, model, shape)
    export_weights(chunks, source=ModelFacts(model), folder=folder, dtype=torch.float32)
    given = dict(whole_weights(chunks, ModelFacts(model), torch.float32))  # to a sampling server
    if is_main_process():
        check_equal(given, folder)
    parallel_state.destroy_model_parallel()


def build(model: Path, layout: dict[str, Any], device: torch.device) -> tuple[Any, ModelShape]:
    shape = ModelFacts(model).shape
    config = make_config(["megatron", layout, "fp32"])
    start_model_parallel(config.layout, is_mixture=shape.num_experts > 0, seed=0)
    return build_model_chunks(shape, config.layout, config.precision, device), shape


def measure(model: Path, layout: dict[str, Any], folder: Path, device: torch.device) -> dict[str, int]:
    """Return the peak host memory in bytes of loading and of exporting a model, beyond the model itself, on rank 0."""
    chunks, shape = build(model, layout, device)
    with watched_memory() as reading:
        load_weights(chunks, model, shape)
    loaded = anonymous_bytes()
    with watched_memory() as writing:
        export_weights(chunks, source=ModelFacts(model), folder=folder, dtype=torch.float32)
    parallel_state.destroy_model_parallel()
    return {"reading": reading.whole - loaded, "writing": writing.whole - loaded}


def travel(model: Path, journey: dict[str, Any], device: torch.device) -> dict[str, Any]:
    """Return the losses after a checkpoint, of the run that saved it, and of others that resumed elsewhere."""
    checkpoint, batches = Path(journey["checkpoint"]), global_batches("packed")
    adapter = journey.get("adapter")
    stayed = None
    if journey["from"]:
        engine, config = make_engine(model, journey["from"], device, adapter)
        train(engine, config, batches[:NUM_STEPS_BEFORE])
        writing = engine.save(checkpoint)
        stayed = train(engine, config, batches[NUM_STEPS_BEFORE:])
        writing.result()
        end(engine)
    moved = []
    for place in journey["to"]:
        engine, config = make_engine(model, place, device, adapter)
        engine.load(checkpoint)
        moved.append(train(engine, config, batches[NUM_STEPS_BEFORE:]))
        end(engine)
    return {"stayed": stayed, "moved": moved}


def misfit(model: Path, checkpoint: Path, device: torch.device) -> str:
    messages = []
    for engine_name in ("fsdp", "megatron"):
        engine, _ = make_engine(model, [engine_name, {"dp_shard": dist.get_world_size()}, "fp32"], device)
        try:
            engine.load(checkpoint)
        except ModelError as error:
            messages.append(str(error))
        end(engine)
    return "\n".join(messages)


def make_engine(
    model: Path, place: list[Any], device: torch.device, adapter: dict[str, Any] | None = None
) -> tuple[Any, TrainConfig]:
    config = make_config(place, adapter)
    if config.engine == "fsdp":
        return FsdpEngine(ModelFacts(model), config.engine_settings, device), config
    return MegatronEngine(ModelFacts(model), config.engine_settings, device), config


def make_config(place: list[Any], adapter: dict[str, Any] | None = None) -> TrainConfig:
    engine, layout, precision = place
    return TrainConfig.model_validate(
        {
            "kind": "train",
            "method": "sft",
            "engine": engine,
            "model": "base",
            "data": {"dataset": "data"},
            "layout": layout,
            "global_batch_size": NUM_ROWS,
            "learning_rate": LEARNING_RATE,
            "adam_epsilon": EPSILON,
            "weight_decay": WEIGHT_DECAY,
            "precision": precision,
            **({"adapter": adapter} if adapter else {}),
        }
    )


def train(engine: Any, config: TrainConfig, global_batches: list[Any]) -> list[float]:
    losses = []
    for rows in global_batches:
        num_rows = len(rows) // engine.data_parallel_size
        batches = [pack([row]) for row in rows[engine.data_rank * num_rows :][:num_rows]]
        torch.manual_seed(sum(rows[0][0]))  # each step has a seed of its own, as in the loop
        losses.append(engine.train_step(batches, SftLoss(), config.learning_rate, 0.5).loss)
    return losses


def end(engine: Any) -> None:
    if isinstance(engine, MegatronEngine):
        parallel_state.destroy_model_parallel()
