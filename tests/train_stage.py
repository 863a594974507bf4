"""Helpers that run train stages as the orchestrator does, on the built-in model and part of the built-in data."""

import itertools
import json
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

from flows.launch import local
from stages.core.contract import StageContext, StageInput
from stages.hubs.builtin import addition, addition_preferences, qwen3
from stages.kinds.train.config import TrainConfig
from tests.forked_stages import warm_parent
from tests.serving import wait_for

VERSION = "0" * 12
NUM_ROWS = {"problems": (400, 40), "preferences": (32, 16)}
"""Numbers of training and held-out rows by dataset; preferences are few, so that a few steps see them several times."""


def make_artifacts(folder: Path) -> dict[str, Path]:
    """Write the artifacts for tests of train stages: the model `base`, the datasets `problems` and `preferences`."""
    artifacts = {name: folder / name for name in ("base", "problems", "preferences")}
    (artifacts["base"] / "model").mkdir(parents=True)
    qwen3.make(artifacts["base"] / "model")
    for name, maker in (("problems", addition), ("preferences", addition_preferences)):
        (artifacts[name] / "data").mkdir(parents=True)
        maker.make(folder)
        for split, num_rows in zip(("train", "validation"), NUM_ROWS[name], strict=True):
            with (folder / f"{split}.jsonl").open() as rows:
                lines = list(itertools.islice(rows, num_rows))
            (artifacts[name] / "data" / f"{split}.jsonl").write_text("".join(lines))
    return artifacts


def make_teacher(artifacts: dict[str, Path], folder: Path) -> Path:
    """Write a teacher for distillation: a model artifact with the architecture of `base` and other weights."""
    import torch
    from transformers import AutoModelForCausalLM

    shutil.copytree(artifacts["base"] / "model", folder / "model")
    model = AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32)
    torch.manual_seed(0)
    for weight in model.parameters():
        weight.data += 0.05 * torch.randn(weight.shape)
    model.save_pretrained(folder / "model")
    return folder


def make_config(method: str = "sft", **fields: Any) -> TrainConfig:
    """Return the config of a train stage with short rows and few steps; `fields` replace fields of the config."""
    data = "problems" if method == "sft" else "preferences"
    return TrainConfig.model_validate(
        {
            "kind": "train",
            "method": method,
            "model": "base",
            "data": {"dataset": data, "evaluation_split": "validation", "sequence_length": 64},
            "steps": 10,
            "global_batch_size": 4,
            "layout": {"micro_batch_size": 2},
            "learning_rate": 1e-3,
            "precision": "fp32",
            "export_dtype": "float32",
            **fields,
        }
    )


def make_context(work: Path, artifacts: dict[str, Path], config: TrainConfig) -> StageContext:
    """Make a train stage's work folder with its `config.json`, and return the stage's context."""
    work.mkdir(parents=True, exist_ok=True)
    cache = work.parent / "cache"
    stage_input = StageInput(
        name="trained",
        kind="train",
        version=VERSION,
        config=config.model_dump(mode="json"),
        inputs=artifacts,
        cache=cache,
    )
    (work / "config.json").write_text(stage_input.model_dump_json())
    return StageContext(work, stage_input.name, VERSION, artifacts, {}, cache)


def start(work: Path, config: TrainConfig) -> subprocess.Popen[bytes]:
    """Start all processes of a train stage; their output goes to `log.txt`."""
    with (work / "log.txt").open("ab") as log:
        environment = {**local.environment(config), "OMP_NUM_THREADS": "1"}
        return subprocess.Popen(local.command(work, config), stdout=log, stderr=log, env=environment)


def run_to_end(work: Path, config: TrainConfig, program: str | None = None) -> None:
    """Run a train stage to its successful end, in processes forked from a parent that has made their imports.

    program: a rank program that runs the stage in another way. Where there is a GPU they are started as ever, since a
    process that knows of it is not to be forked.
    """
    log = work / "log.txt"
    if shutil.which("nvidia-smi") and not program:
        assert start(work, config).wait(timeout=300) == 0, log.read_text()[-4000:]
        return
    warm, environment = _warm(config)
    warm_parent(warm).run(program or warm, config.processes, work, environment, log=log)


def start_forked(work: Path, config: TrainConfig) -> tuple[int, Callable[[], int | None]]:
    """Fork a train stage's processes from a parent with their imports, without waiting for their end.

    Returns their parent's pid, and a function that waits for the exit code of the first that failed, else 0.
    """
    if shutil.which("nvidia-smi"):
        process = start(work, config)
        return process.pid, lambda: process.wait(timeout=300)
    warm, environment = _warm(config)
    parent = warm_parent(warm)
    return parent.pid, parent.start(warm, config.processes, work, environment, log=work / "log.txt")


def ranks_of(parent: int, processes: int) -> list[int]:
    """Return a train stage's ranks, oldest first, as soon as their parent has started all of them."""
    children = Path(f"/proc/{parent}/task/{parent}/children")

    def started() -> list[int] | None:
        ranks = [int(pid) for pid in children.read_text().split()]
        return ranks if len(ranks) == processes else None

    found: list[int] = wait_for(started, what="the start of all ranks")
    return found


def _warm(config: TrainConfig) -> tuple[str, str]:
    """Return the program to fork for a train stage on the config's engine, and the program's environment as JSON."""
    program = f"tests.warm_{'megatron_' * (config.engine == 'megatron')}stage"
    return program, json.dumps({**local.environment(config), "OMP_NUM_THREADS": "1"})


def finish_again(done: Path, step: int, work: Path, artifacts: dict[str, Path], config: TrainConfig) -> None:
    """Copy a finished train stage's work folder, and train the copy again from the checkpoint of a step to the end."""
    shutil.copytree(done, work)
    shutil.rmtree(work / config.product)
    for checkpoint in (work / "scratch" / "checkpoints").iterdir():
        if checkpoint.name != f"step-{step}":
            shutil.rmtree(checkpoint)
    make_context(work, artifacts, config)
    run_to_end(work, config)
    output = (work / "log.txt").read_text() + (work / "events.jsonl").read_text()
    assert f"continuing from the checkpoint of step {step}" in output


def logged(work: Path) -> list[dict[str, float]]:
    """Return the metrics of every training step from the stage's `metrics.jsonl`, without a line that is half there."""
    lines = (work / "metrics.jsonl").read_text().splitlines(keepends=True)
    return [json.loads(line) for line in lines if line.endswith("\n")]
