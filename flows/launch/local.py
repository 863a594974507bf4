"""Local launcher: the processes of a stage on this machine, under the supervisor."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import stages
from flows.ledger.home import hardware_file
from flows.store.content import LOG_FILE
from stages.core.contract import StageConfig
from stages.core.supervised import Supervised

TELEMETRY_OFF = {
    "DO_NOT_TRACK": "true",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
}
PROGRAMS = {"promote": "flows.champion.promotion"}
"""Kinds that need a program before the stage, which it starts, and one after its commit (`hook.py`). Known by name: the
program lies above this, and imports mlflow, which takes seconds."""
ON_LOOPBACK = {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"}
"""Processes of one node are reached from no other machine."""
EVERYWHERE = {
    **TELEMETRY_OFF,
    "PYTHONUNBUFFERED": "1",
    # Threads that spin at a barrier take the core from those they wait for: on a busy machine, 6 times slower.
    "OMP_WAIT_POLICY": "PASSIVE",
}
"""What every stage process has in its environment, wherever it runs."""


def start(work: Path, config: StageConfig) -> Supervised:
    """Start the stage whose `config.json` lies in `work`; its output is appended to `log.txt` there."""
    with (work / LOG_FILE).open("ab") as log:
        return Supervised(command(work, config), environment=environment(config), output=log)


def command(work: Path, config: StageConfig) -> list[str]:
    """What to run: the stage itself, or what starts it several times."""
    program = [PROGRAMS[config.kind], "judge"] if config.kind in PROGRAMS else ["stages"]
    return on_one_node(["-m", *program, str(work)], config.processes)


def on_one_node(stage: list[str], processes: int) -> list[str]:
    """The command that starts `processes` times `python STAGE`."""
    if processes == 1:
        return [sys.executable, *stage]
    return [sys.executable, "-m", "stages.parallel.ranks", f"--processes={processes}", "--", *stage]


def environment(config: StageConfig) -> dict[str, str]:
    """Ours, with what a stage needs; `execution.environment` has the last word."""
    python_path = ":".join(filter(None, [str(code_folder()), os.environ.get("PYTHONPATH")]))
    return {
        **os.environ,
        **EVERYWHERE,
        **ON_LOOPBACK,
        "PYTHONPATH": python_path,
        "LIFECYCLE_HARDWARE": str(hardware_file()),
        **threads(config.execution.threads or threads_of_each(config.processes)),
        **config.execution.environment,
    }


def threads(number: int) -> dict[str, str]:
    """Variables that say so to what computes, and to what tokenizes."""
    return dict.fromkeys(("OMP_NUM_THREADS", "RAYON_NUM_THREADS"), str(number))


def threads_of_each(processes: int) -> int:
    """The cores that this process may use, shared evenly."""
    return max(1, len(os.sched_getaffinity(0)) // processes)


def code_folder() -> Path:
    """The folder that holds the packages `stages` and `flows`."""
    return Path(stages.__file__).parent.parent
