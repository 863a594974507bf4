"""Test program that trains two steps, and writes each process's peak memory and the planner's prediction of it.

Freed memory goes back to the system at once: what the C library would keep is not part of a layout's memory, and
neither is what reading the model took.

    memory_program MODEL OUTPUT.json FIELDS

`FIELDS` are those of a TrainConfig, as JSON.
"""

import ctypes
import json
import sys
from pathlib import Path

from stages.models.start_up import start_training_quickly

start_training_quickly()  # as a train stage does: the packages that it does without would count
import torch  # noqa: E402

from stages.core.contract import is_main_process  # noqa: E402
from stages.data.batch import IGNORED, Batch, Documents  # noqa: E402
from stages.engines.fsdp.engine import FsdpEngine  # noqa: E402
from stages.kinds.train.config import TrainConfig  # noqa: E402
from stages.kinds.train.methods.sft import SftLoss  # noqa: E402
from stages.models.facts import ModelFacts  # noqa: E402
from stages.parallel.processes import gathered, joined_processes  # noqa: E402
from stages.planner.costs import SearchRequest  # noqa: E402
from stages.planner.hardware import hardware_at_hand  # noqa: E402
from stages.planner.search import estimate  # noqa: E402

NUM_STEPS = 2
M_MMAP_THRESHOLD, LARGE_BYTES = -3, 2**20
"""Option and value for glibc's `mallopt(3)`: blocks of 1 MiB or more get a mapping of their own, freed at once."""
FORGET_PEAK = "5"
"""Value that resets a process's peak memory when it is written to `/proc/self/clear_refs`."""


def main() -> None:
    folder, output, config = Path(sys.argv[1]), Path(sys.argv[2]), TrainConfig.model_validate_json(sys.argv[3])
    torch.set_num_threads(1)
    assert ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, LARGE_BYTES)
    with joined_processes() as device:
        shape = ModelFacts(folder).shape
        hardware = hardware_at_hand(None, config.processes, None)
        assert hardware
        request = SearchRequest(shape, config.workload, hardware, config.layout.world_size)
        predicted = estimate(request, config.engine, config.layout).memory
        if config.engine == "fsdp":
            engine = FsdpEngine(ModelFacts(folder), config.engine_settings, device)
        else:
            engine = megatron_engine(folder, config, device)
        Path("/proc/self/clear_refs").write_text(FORGET_PEAK)
        rows = [row_of(config.data.sequence_length, shape.vocab_size) for _ in range(config.micro_batches_per_step)]
        for _ in range(NUM_STEPS):
            engine.train_step(rows, SftLoss(), config.learning_rate, config.max_grad_norm)
        measured_gib = gathered(held_gib())
    if is_main_process():
        parts = vars(predicted.worst)
        output.write_text(
            json.dumps({"predicted_gib": predicted.peak_gib, "measured_gib": measured_gib, "parts_gib": parts})
        )


def held_gib() -> float:
    """Return this process's peak memory in GiB since the peak was last reset."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM")) / 2**20


def megatron_engine(folder, config, device):
    from stages.engines.megatron.compat import prepare_megatron

    prepare_megatron()
    from stages.engines.megatron.engine import MegatronEngine

    return MegatronEngine(ModelFacts(folder), config.engine_settings, device)


def row_of(num_tokens: int, vocabulary: int) -> Batch:
    """Return a batch with one row that is one document of `num_tokens` tokens."""
    tokens = torch.arange(num_tokens)[None] % vocabulary
    targets = torch.cat([tokens[:, 1:], torch.tensor([[IGNORED]])], dim=1)
    positions = torch.arange(num_tokens)[None]
    return Batch.of(tokens, targets, positions, Documents(torch.zeros_like(tokens), 1, [num_tokens]))
