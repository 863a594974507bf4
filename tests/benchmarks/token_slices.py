"""Benchmark of context parallelism: memory and processor time of a step on one long row, by one process and by two.

Run: `python -m tests.benchmarks.token_slices [TOKENS]`; on CPUs, one thread a process, in fp32. Prints the shares of
one process that each of two needs: of memory above that before the model, at most 0.6 is the bound; of CPU-seconds,
0.65.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist
from transformers import Qwen3Config, Qwen3ForCausalLM

from stages.data.batch import Batch, Documents
from stages.engines.fsdp.engine import FsdpEngine
from stages.kinds.train.config import TrainConfig
from stages.kinds.train.methods.sft import SftLoss
from stages.models.facts import ModelFacts
from stages.parallel.processes import joined_processes
from stages.parallel.ranks import RENDEZVOUS_FILE
from tests.peak_memory import watched_memory

NUM_STEPS = 2
SIZES = {
    "hidden_size": 256,
    "intermediate_size": 768,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 32,
    "num_hidden_layers": 4,
    "vocab_size": 512,
}
BOUNDS = {"memory": 0.6, "CPU-seconds": 0.65}


def main() -> None:
    if len(sys.argv) > 2:
        measure(Path(sys.argv[1]), int(sys.argv[2]))
        return
    tokens = sys.argv[1] if len(sys.argv) > 1 else "16384"
    with tempfile.TemporaryDirectory(prefix="token-slices-") as folder:
        Qwen3ForCausalLM(Qwen3Config(**SIZES)).save_pretrained(folder)
        alone, both = (run(Path(folder), number, tokens) for number in (1, 2))
    for name, bound in BOUNDS.items():
        share = max(one[name] for one in both) / alone[0][name]
        print(f"{name}: {share:.2f} of one process's for each of two, at most {bound}; one takes {alone[0][name]:.3g}")


def run(folder: Path, number: int, tokens: str) -> list[dict[str, float]]:
    """Return what each of a number of processes, which share the tokens of a row, measured."""
    meeting = str(folder / f"meeting-{number}")
    command = [sys.executable, "-m", "tests.benchmarks.token_slices", str(folder), tokens]
    ranks = [
        subprocess.Popen(
            command,
            env={
                **os.environ,
                "RANK": f"{rank}",
                "LOCAL_RANK": f"{rank}",
                "WORLD_SIZE": f"{number}",
                RENDEZVOUS_FILE: meeting,
            },
        )
        for rank in range(number)
    ]
    codes = [rank.wait() for rank in ranks]
    assert not any(codes), codes
    return [json.loads((folder / f"{number}.{rank}.json").read_text()) for rank in range(number)]


def measure(folder: Path, tokens: int) -> None:
    """Train on a row of random tokens; write the peak memory above that before the model, and a step's CPU-seconds."""
    torch.set_num_threads(1)
    with joined_processes() as device:
        number = dist.get_world_size()
        config = TrainConfig.model_validate(
            {
                "kind": "train",
                "method": "sft",
                "model": "base",
                "data": {"dataset": "rows", "sequence_length": tokens},
                "global_batch_size": 1,
                "learning_rate": 1e-3,
                "precision": "fp32",
                "layout": {"cp": number},
            }
        )
        with watched_memory() as peak:
            engine = FsdpEngine(ModelFacts(folder), config.engine_settings, device)
            ids = torch.randint(0, SIZES["vocab_size"], (1, tokens), generator=torch.Generator().manual_seed(0))
            batch = Batch.of(ids, ids, torch.arange(tokens)[None], Documents(torch.zeros_like(ids), 1, [tokens]))
            engine.train_step([batch], SftLoss(), 1e-3, 1.0)
            start = time.process_time()
            for _ in range(NUM_STEPS):
                engine.train_step([batch], SftLoss(), 1e-3, 1.0)
            seconds = (time.process_time() - start) / NUM_STEPS
        found = {"memory": peak.added, "CPU-seconds": seconds}
        (folder / f"{number}.{dist.get_rank()}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main()
