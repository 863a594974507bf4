"""Which launcher a stage gets, and what an attempt that died may have left on a cluster."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from flows.launch import local, slurm
from flows.stage_process import Process
from stages.contract import StageConfig

STARTERS: dict[str, Callable[[Path, StageConfig], Process]] = {"local": local.start, "slurm": slurm.start}


def start(work: Path, config: StageConfig) -> Process:
    """Start the stage whose `config.json` lies in `work` where its `execution.launcher` says."""
    return STARTERS[config.execution.launcher](work, config)


def cancel_left_over(work: Path) -> None:
    """Cancel the jobs that an attempt in this folder may have left on a cluster, should its flow have died."""
    slurm.cancel_left_over(work)
