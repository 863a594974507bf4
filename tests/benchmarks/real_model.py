"""Benchmark of SFT on a real model: our train stage against TRL's `SFTTrainer` (with PEFT), in fp32 and in bf16.

Run: `python tests/benchmarks/real_model.py MODEL ROWS`; MODEL is a Hugging Face folder with a chat template, ROWS a
JSON list of objects with `instruction`, `input` and `output`. Rows of 512 tokens, global batch 4, micro-batches of 2,
whole weights and an adapter (rank 16), recomputation off on both sides, one process each, alternating. Prints the
medians of the rounds' ratios. Other programs disturb times less in processor seconds, which are user and system time
of the process between the ends of two steps; OpenMP's threads sleep at barriers, which would be counted as work. Aims:
1.25 times TRL's speed in fp32, 1.4 times in bf16; at most 0.8 of its memory.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import tempfile
import time
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from workload import read_metrics, run_trl, stage_command, stage_input

from stages.core.contract import StageInput, Trial

SEQUENCE_LENGTH, ROWS_PER_STEP, ROWS_PER_MICRO_BATCH = 512, 4, 2
TOKENS_PER_STEP = SEQUENCE_LENGTH * ROWS_PER_STEP
WARMUP_STEPS = 1
RANK = 16
CASES = {
    "lora-fp32": ("fp32", RANK),
    "whole-fp32": ("fp32", None),
    "lora-bf16": ("bf16", RANK),
    "whole-bf16": ("bf16", None),
}
"""Precision and rank of the adapter (None: whole weights) by name of the case."""
DTYPES = {"fp32": "float32", "bf16": "bfloat16"}
POLL_S = 0.02


@dataclass(frozen=True)
class Measured:
    """Medians of a training's steps: seconds, processor seconds; and its peak memory."""

    step_s: float
    processor_s: float
    memory_gib: float

    @classmethod
    def of(cls, steps_s: list[float], processor_s: list[float], memory_gib: float) -> Measured:
        medians = (statistics.median(values[WARMUP_STEPS:]) for values in (steps_s, processor_s))
        return cls(*medians, memory_gib)

    def __str__(self) -> str:
        return (
            f"{TOKENS_PER_STEP / self.step_s:,.0f} tokens/s, {self.processor_s:.1f} processor seconds a step, "
            f"{self.memory_gib:.2f} GiB"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("rows", type=Path)
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    arguments = parser.parse_args()
    os.environ |= {"OMP_WAIT_POLICY": "PASSIVE", "OMP_NUM_THREADS": str(arguments.threads)}
    ratios: dict[str, list[tuple[float, float, float]]] = {case: [] for case in arguments.cases}
    with tempfile.TemporaryDirectory(prefix="real-model-") as folder:
        root = Path(folder)
        write_inputs(root, arguments.model.resolve(), arguments.rows)
        for index in range(arguments.rounds):
            for case in arguments.cases:
                ratios[case].append(one_round(root, index, case, arguments.steps, arguments.threads))
    for case, rounds in ratios.items():
        speed, work, memory = (statistics.median(column) for column in zip(*rounds, strict=True))
        print(f"{case}: {speed:.2f} times TRL's tokens/s, {work:.2f} by processor time, {memory:.2f} of its memory")


def write_inputs(root: Path, model: Path, rows: Path) -> None:
    """Write the artifacts `root/model`, a link to the model, and `root/chats`, of one question and answer each."""
    (root / "model").mkdir()
    (root / "model/model").symlink_to(model)
    (root / "chats/data").mkdir(parents=True)
    with (root / "chats/data/train.jsonl").open("w") as stream:
        for row in json.loads(rows.read_text()):
            question = "\n\n".join(filter(None, [row["instruction"], row["input"]]))
            messages = [{"role": "user", "content": question}, {"role": "assistant", "content": row["output"]}]
            stream.write(json.dumps({"messages": messages}) + "\n")


def one_round(root: Path, index: int, case: str, steps: int, threads: int) -> tuple[float, float, float]:
    """Train once with our stage and once with TRL; return ratios of tokens/s, of that by processor time, of memory."""
    ours, trl = train_ours(root, f"{case}-{index}", case, steps), train_trl(root, case, steps, threads)
    print(f"{case}, round {index}: ours {ours}; TRL {trl}", flush=True)
    return trl.step_s / ours.step_s, trl.processor_s / ours.processor_s, ours.memory_gib / trl.memory_gib


def train_ours(root: Path, name: str, case: str, steps: int) -> Measured:
    """Run a trial of the train stage, reading its processor time whenever it has logged a step."""
    precision, rank = CASES[case]
    fields: dict[str, Any] = {
        "data": {"dataset": "chats", "sequence_length": SEQUENCE_LENGTH, "over_long": "drop"},
        "global_batch_size": ROWS_PER_STEP,
        "layout": {"micro_batch_size": ROWS_PER_MICRO_BATCH},
        "precision": precision,
        "export_dtype": DTYPES[precision],
        **({"adapter": {"rank": rank, "alpha": 2 * rank}} if rank else {}),
    }
    given = stage_input(root, name=name, steps=steps, **fields).model_copy(update={"trial": Trial(steps=steps)})
    processor_s = watched(given, root / name)
    metrics = read_metrics(root / name)
    # Nothing is known of the time before the first step's end, which is part of the warm-up.
    step_processor_s = [end - start for start, end in pairwise([0.0, *processor_s])]
    memory_gib = max(step["peak_memory_gib"] for step in metrics)
    return Measured.of([step["step_time_s"] for step in metrics], step_processor_s, memory_gib)


def watched(given: StageInput, work: Path) -> list[float]:
    """Run a stage of one process to its end; return the processor seconds that it had used when each step ended."""
    work.mkdir()
    (work / "config.json").write_text(given.model_dump_json())
    used_s: list[float] = []
    with (work / "log.txt").open("w") as log, subprocess.Popen(stage_command(given, work), stderr=log) as process:
        while process.poll() is None:
            logged = len(read_metrics(work))
            used_s += [processor_s(process.pid)] * (logged - len(used_s))
            time.sleep(POLL_S)
    if process.returncode:
        raise RuntimeError(
            f"the train stage ended with {process.returncode}:\n{(work / 'log.txt').read_text()[-2000:]}"
        )
    return used_s


def processor_s(pid: int) -> float:
    """Return the user and system time that all threads of a process have used, in seconds."""
    # proc(5): fields 14 and 15; the second, the program's name in parentheses, may hold spaces
    user, system = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:13]
    return (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")


def train_trl(root: Path, case: str, steps: int, threads: int) -> Measured:
    precision, rank = CASES[case]
    options = {
        "--sequence-length": SEQUENCE_LENGTH,
        "--rows": ROWS_PER_MICRO_BATCH,
        "--micro-batches": ROWS_PER_STEP // ROWS_PER_MICRO_BATCH,
        "--dtype": DTYPES[precision],
        **({"--rank": rank} if rank else {}),
    }
    printed = run_trl(root, steps, threads, *(str(part) for option in options.items() for part in option))
    return Measured.of(printed["step_times_s"], printed["step_processor_s"], printed["peak_memory_gib"])


if __name__ == "__main__":
    main()
