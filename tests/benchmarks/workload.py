"""Workload of the training benchmarks: a Qwen3 model of five million parameters or more, and chats of uneven length."""

import json
import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from flows.launch.local import on_one_node
from stages.core.contract import StageInput
from stages.hubs.builtin.qwen3 import make_tokenizer
from stages.kinds.train.config import TrainConfig

SEQUENCE_LENGTH = 256
ROWS_PER_STEP = 8
NUM_CHATS = 4000
VOCABULARY = 4096
SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 256,
    "intermediate_size": 768,
    "num_hidden_layers": 5,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
}


def write_workload(root: Path, **sizes: int) -> None:
    """Write the model artifact `root/model` and the dataset artifact `root/chats` that training benchmarks use."""
    make_model(root / "model" / "model", **sizes)
    make_chats(root / "chats" / "data")


def make_model(folder: Path, **sizes: int) -> None:
    """Write an fp32 Qwen3 (tied head) with tokenizer and template: 4.98 million parameters, unless `sizes` differ."""
    tokenizer = make_tokenizer()
    config = Qwen3Config(
        **{**SIZES, **sizes},
        max_position_embeddings=2048,
        tie_word_embeddings=True,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    torch.manual_seed(0)
    Qwen3ForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def make_chats(folder: Path) -> None:
    """Write `train.jsonl` with random chats of 30 to 230 tokens, most of them short."""
    folder.mkdir(parents=True)
    generator = random.Random(0)
    with (folder / "train.jsonl").open("w") as stream:
        for _ in range(NUM_CHATS):
            question, answer = (_text(generator, most) for most in (60, 130))
            messages = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
            stream.write(json.dumps({"messages": messages}) + "\n")


def _text(generator: random.Random, most_characters: int) -> str:
    length = int(10 + (most_characters - 10) * generator.random() ** 2)
    return "".join(generator.choice("abcdefghijklmnopqrstuvwxyz     ") for _ in range(length))


def stage_input(root: Path, *, name: str, steps: int, processes: int = 1, **fields: Any) -> StageInput:
    """Return the input of a train stage on the benchmark's model and chats; `fields` override config fields."""
    config: dict[str, Any] = {
        "kind": "train",
        "method": "sft",
        "model": "model",
        "data": {"dataset": "chats", "sequence_length": SEQUENCE_LENGTH},
        "steps": steps,
        "global_batch_size": ROWS_PER_STEP,
        "layout": {
            "dp_shard": processes,
            "micro_batch_size": ROWS_PER_STEP // processes,
            "reshard_after_forward": False,
        },
        "learning_rate": 1e-3,
        "precision": "fp32",
        "export_dtype": "float32",
        "execution": {"checkpoint_every_steps": steps + 1},
        **fields,
    }
    inputs = {"model": root / "model", "chats": root / "chats"}
    return StageInput(name=name, kind="train", version="0" * 12, config=config, inputs=inputs, cache=root / "cache")


def run_stage(root: Path, given: StageInput, threads: int) -> list[dict[str, float]]:
    """Run a train stage to its end, on one process or several; return the metrics of every step."""
    work = root / given.name
    work.mkdir()
    (work / "config.json").write_text(given.model_dump_json())
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads)}
    done = subprocess.run(stage_command(given, work), env=environment, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"the train stage ended with exit code {done.returncode}:\n{done.stderr[-2000:]}")
    return read_metrics(work)


def read_metrics(work: Path) -> list[dict[str, float]]:
    """Return the metrics of every step that a train stage has logged so far."""
    file = work / "metrics.jsonl"
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def run_trl(root: Path, steps: int, threads: int, *options: str, program: str = "trl_sft.py") -> dict[str, Any]:
    """Train with a program of TRL in a process of its own, and return the JSON object that it prints."""
    command = [sys.executable, str(Path(__file__).with_name(program)), str(root), str(steps), *options]
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"TRL ended with exit code {done.returncode}:\n{done.stderr[-2000:]}")
    printed: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return printed


def stage_command(given: StageInput, work: Path) -> list[str]:
    """Return the command that runs the benchmark's train stage, on one process or several."""
    stage = ["-m", "stages", str(work)]
    processes = TrainConfig.model_validate(given.config).processes
    return on_one_node(stage, processes)
