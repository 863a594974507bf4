"""Which launcher a stage gets."""

from __future__ import annotations

from pathlib import Path

from flows.launch import cluster, local
from flows.launch.stage_process import Process
from stages.core.contract import StageConfig


def start(work: Path, config: StageConfig) -> Process:
    """Start the stage whose `config.json` lies in `work` where its `execution.launcher` says."""
    if config.execution.launcher == "local":
        return local.start(work, config)
    return cluster.start(work, config)
