"""Local launcher: the processes of a stage on this machine, under the supervisor; several of them by torchrun."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import stages
from flows.content import LOG_FILE
from stages.contract import StageConfig
from stages.supervised import Supervised

TELEMETRY_OFF = {
    "DO_NOT_TRACK": "true",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
}
SINGLE_NODE = {"MASTER_ADDR": "127.0.0.1", "GLOO_SOCKET_IFNAME": "lo"}


def start(work: Path, config: StageConfig) -> Supervised:
    """Start the stage whose `config.json` lies in `work`; its output is appended to `log.txt` there."""
    with (work / LOG_FILE).open("ab") as log:
        return Supervised(command(work, config), environment=environment(config), output=log)


def command(work: Path, config: StageConfig) -> list[str]:
    """What to run: the stage itself, or torchrun with a rendezvous on a free port of the loopback."""
    stage = ["-m", "stages", str(work)]
    if config.processes == 1:
        return [sys.executable, *stage]
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--local-addr=127.0.0.1"]
    return [*torchrun, f"--nproc-per-node={config.processes}", "--max-restarts=0", *stage]


def environment(config: StageConfig) -> dict[str, str]:
    """Ours, with what a stage needs; `execution.environment` has the last word."""
    code = str(Path(stages.__file__).parent.parent)
    python_path = ":".join(filter(None, [code, os.environ.get("PYTHONPATH")]))
    threads = config.execution.threads or max(1, len(os.sched_getaffinity(0)) // config.processes)
    return {
        **os.environ,
        **TELEMETRY_OFF,
        **SINGLE_NODE,
        "PYTHONPATH": python_path,
        "PYTHONUNBUFFERED": "1",
        "OMP_NUM_THREADS": str(threads),
        # Threads that spin at a barrier take the core from those they wait for: on a busy machine, 6 times slower.
        "OMP_WAIT_POLICY": "PASSIVE",
        **config.execution.environment,
    }
