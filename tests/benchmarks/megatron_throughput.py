"""Benchmark of the Megatron engine: training tokens/s against plain Transformers.

Run: `python tests/benchmarks/megatron_throughput.py`.
One process, the same model, batch, precision and AdamW on both sides, alternating; on a CPU in fp32, on a GPU in bf16.
Prints the median of the rounds' ratios. Aim: at least 1.0.
"""

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM
from workload import ROWS_PER_STEP, SEQUENCE_LENGTH, VOCABULARY, make_model

from stages.data.batch import IGNORED, Batch, Documents
from stages.engines.megatron.compat import prepare_megatron
from stages.kinds.train.config import TrainConfig
from stages.kinds.train.methods.sft import SftLoss
from stages.models.facts import ModelFacts
from stages.parallel.processes import joined_processes

LEARNING_RATE = 1e-3
WARMUP_STEPS = 3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--steps",
        type=int,
        default=4,
        help="number of training steps of each program (Megatron, plain Transformers) in a round",
    )
    parser.add_argument("--threads", type=int, default=2)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    with tempfile.TemporaryDirectory(prefix="megatron-throughput-") as folder, joined_processes() as device:
        make_model(Path(folder))
        tokens = torch.randint(0, VOCABULARY, (ROWS_PER_STEP, SEQUENCE_LENGTH))
        sides = [megatron_step(Path(folder), tokens, device), plain_step(Path(folder), tokens, device)]
        for step in sides:
            steps_per_s(step, WARMUP_STEPS)
        rounds = [[steps_per_s(step, arguments.steps) for step in sides] for _ in range(arguments.rounds)]
    for megatron, plain in rounds:
        print(f"megatron {tokens.numel() * megatron:,.0f}, Transformers {tokens.numel() * plain:,.0f} tokens/s")
    print(f"median ratio: {statistics.median(megatron / plain for megatron, plain in rounds):.2f}")


def megatron_step(folder: Path, tokens: torch.Tensor, device: torch.device) -> Callable[[], float]:
    """Load the Megatron engine; return a function that runs one training step and returns its loss."""
    prepare_megatron()
    from stages.engines.megatron.engine import MegatronEngine

    engine = MegatronEngine(ModelFacts(folder), config(device).engine_settings, device)
    batch = whole_rows(tokens)
    return lambda: engine.train_step([batch], SftLoss(), LEARNING_RATE, 1.0).loss


def config(device: torch.device) -> TrainConfig:
    return TrainConfig.model_validate(
        {
            "kind": "train",
            "method": "sft",
            "model": "model",
            "data": {"dataset": "chats", "sequence_length": SEQUENCE_LENGTH},
            "engine": "megatron",
            "layout": {"micro_batch_size": ROWS_PER_STEP},
            "global_batch_size": ROWS_PER_STEP,
            "learning_rate": LEARNING_RATE,
            "precision": "bf16" if device.type == "cuda" else "fp32",
        }
    )


def whole_rows(tokens: torch.Tensor) -> Batch:
    """Return a batch in which each row is one document."""
    rows, length = tokens.shape
    targets = torch.cat([tokens[:, 1:], torch.full((rows, 1), IGNORED)], dim=1)
    positions, ids = torch.arange(length).expand(rows, -1), torch.arange(rows)[:, None].expand(-1, length)
    return Batch.of(tokens, targets, positions, Documents(ids, rows, [length] * rows))


def plain_step(folder: Path, tokens: torch.Tensor, device: torch.device) -> Callable[[], float]:
    """Load the model with Transformers; return a function that runs one step of a minimal training loop."""
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).to(device).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.95), weight_decay=0.0)
    ids = tokens.to(device)

    def step() -> float:
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()

    return step


def steps_per_s(step: Callable[[], float], steps: int) -> float:
    start_s = time.perf_counter()
    for _ in range(steps):
        step()
    return steps / (time.perf_counter() - start_s)


if __name__ == "__main__":
    main()
