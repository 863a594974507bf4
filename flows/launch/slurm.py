"""Slurm launcher: a stage as a batch job, whose job script runs one task a node. What it needs:

the store, this code and its Python environment under the same paths on all nodes, and `sbatch` where the refresh runs.
The job's output, metrics and events go to the files of the work folder, as those of a local stage do.
"""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

from flows.launch import local, slurm_client
from flows.launch.cluster_process import ClusterProcess
from flows.launch.job_folder import HEARTBEAT_PATIENCE_S, JobFolder, JobOrder
from flows.store.content import LOG_FILE
from stages.contract import StageConfig, StageInput

SCRIPT = Path(__file__).with_name("slurm_job.sh")
CANCEL_PATIENCE_S = 30.0
MACHINES_OWN = re.compile(
    r"(SLURM|SBATCH|SRUN|PMI|PMIX|OMPI|PET|XDG|SSH|DBUS|LIFECYCLE_STAGE)_.*|SLURMD?|RANK|WORLD_SIZE|LOCAL_RANK|MASTER_.*|"
    r"HOSTNAME|PWD|OLDPWD|SHLVL|TERM|DISPLAY|TMPDIR|_|(CUDA|ROCR|HIP|ZE)_VISIBLE_DEVICES|GPU_DEVICE_ORDINAL|OMP_NUM_THREADS"
)
"""Variables that describe the machine or job that the refresh runs in, not the one that the stage is to run in."""


def start(
    work: Path,
    config: StageConfig,
    *,
    stage_command: list[str] | None = None,
    heartbeat_patience_s: float = HEARTBEAT_PATIENCE_S,
) -> ClusterProcess:
    """Submit the stage whose `config.json` lies in `work`.

    stage_command: arguments of Python; default: the stage itself.
    heartbeat_patience_s: a job that nobody has waited for this long ends itself.
    """
    execution = config.execution
    name = StageInput.model_validate_json((work / "config.json").read_bytes()).name
    order = JobOrder(
        job=f"lifecycle-{name}-{os.urandom(6).hex()}",
        launcher="slurm",
        stage=name,
        work=work,
        stage_command=stage_command or ["-m", "stages", str(work)],
        nodes=execution.nodes,
        processes=config.processes,
        threads=execution.threads,
        interruptions_without_progress=execution.retries,
        slurm=execution.slurm,
        kubernetes=execution.kubernetes,
        heartbeat_patience_s=heartbeat_patience_s,
    )
    folder = JobFolder.of(work)
    folder.write(order, handed_over(config))
    (work / LOG_FILE).touch(mode=0o600)
    return ClusterProcess(work, "flows.launch.slurm_agent", cancel_left_over, grace_s=CANCEL_PATIENCE_S + 5.0)


def handed_over(config: StageConfig) -> dict[str, str]:
    """The environment of the stage's processes, but for what their node decides."""
    ours = {name: value for name, value in os.environ.items() if not MACHINES_OWN.fullmatch(name)}
    python_path = ":".join(filter(None, [str(local.code_folder()), os.environ.get("PYTHONPATH")]))
    return {**ours, **local.EVERYWHERE, "PYTHONPATH": python_path, **config.execution.environment}


def sbatch_arguments(order: JobOrder, folder: JobFolder) -> list[str]:
    """Options, script and its arguments. No environment is handed to Slurm, which would keep it in its records."""
    asked = order.slurm
    options = {
        "job-name": order.job,
        "chdir": str(order.work),
        "output": str(order.work / LOG_FILE).replace("%", "%%"),
        "open-mode": "append",
        "export": "NONE",
        "nodes": order.nodes,
        "ntasks-per-node": 1,
        "cpus-per-task": asked.cpus_per_node or order.cores_per_node,
        "signal": f"B:TERM@{asked.warning_s}",
        "partition": asked.partition,
        "account": asked.account,
        "qos": asked.qos,
        "time": asked.time_limit,
        "gpus-per-node": asked.gpus_per_node,
        "mem": asked.memory_gib_per_node and f"{round(asked.memory_gib_per_node * 1024)}M",
    }
    script = [
        str(SCRIPT),
        sys.executable,
        str(local.code_folder()),
        str(folder.path),
        os.environ.get("PATH", os.defpath),
    ]
    return ["--requeue", *(f"--{name}={value}" for name, value in options.items() if value), *asked.options, *script]


def cancel_left_over(work: Path) -> None:
    """Cancel what an attempt that died may have left in the queue; returns when it is gone.

    Raises `TransientError` when Slurm does not answer: two jobs must not work in one folder.
    """
    order = JobFolder.of(work).order()
    if order and order.launcher == "slurm":
        slurm_client.cancel(order.job, CANCEL_PATIENCE_S)
