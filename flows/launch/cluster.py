"""Launcher for clusters: a stage as a job of Slurm or Kubernetes. What it needs:

the store under the same path here and on the nodes, and this code there too: with Slurm under the same path as well,
with Kubernetes in the image. The job's output, metrics and events go to the files of the work folder, as those of a
local stage do.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Literal

from flows.launch import local
from flows.launch.agent import jobs_of
from flows.launch.cluster_job import HEARTBEAT_PATIENCE_S, JobFolder, JobOrder
from flows.ledger.home import home
from flows.store.content import LOG_FILE
from stages.core.contract import StageConfig, StageInput
from stages.core.errors import LifecycleError
from stages.core.supervised import Supervised

CANCEL_GRACE_S = 40.0
MACHINES_OWN = re.compile(
    r"(SLURM|SBATCH|SRUN|PMI|PMIX|OMPI|PET|XDG|SSH|DBUS|LIFECYCLE_STAGE|KUBERNETES)_.*|RANK|WORLD_SIZE|LOCAL_RANK|"
    r"MASTER_.*|HOSTNAME|PWD|OLDPWD|SHLVL|TERM|DISPLAY|TMPDIR|_|(CUDA|ROCR|HIP|ZE)_VISIBLE_DEVICES|GPU_DEVICE_ORDINAL|"
    r"(OMP|RAYON)_NUM_THREADS"
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
    name = StageInput.model_validate_json((work / "config.json").read_bytes()).name
    order = order_of(name, work, config, stage_command or ["-m", "stages", str(work)], heartbeat_patience_s)
    JobFolder.of(work).write(order, handed_over(config, order.launcher))
    (work / LOG_FILE).touch(mode=0o600)
    return ClusterProcess(work, cancel_left_over, grace_s=CANCEL_GRACE_S)


def order_of(
    name: str, work: Path, config: StageConfig, stage_command: list[str], heartbeat_patience_s: float
) -> JobOrder:
    """The order of a stage's job. Its name is one that no other job has."""
    execution = config.execution
    assert execution.launcher != "local"
    # Kubernetes wants names that are labels of DNS, with room for the suffixes of pods.
    label = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")[:30]
    return JobOrder(
        job=f"lifecycle-{label}-{os.urandom(6).hex()}",
        launcher=execution.launcher,
        stage=name,
        work=work,
        home=home(),
        stage_command=stage_command,
        nodes=execution.nodes,
        processes=config.processes,
        threads=execution.threads,
        network_interface=execution.network_interface,
        interruptions_without_progress=execution.retries,
        slurm=execution.slurm,
        kubernetes=execution.kubernetes,
        heartbeat_patience_s=heartbeat_patience_s,
    )


def handed_over(config: StageConfig, launcher: Literal["slurm", "kubernetes"]) -> dict[str, str]:
    """The environment of the stage's processes, but for what their node, or the pod's image, decides."""
    ours: dict[str, str] = {}
    if launcher == "slurm":
        ours = {name: value for name, value in os.environ.items() if not MACHINES_OWN.fullmatch(name)}
        ours["PYTHONPATH"] = ":".join(filter(None, [str(local.code_folder()), os.environ.get("PYTHONPATH")]))
    return {**ours, **local.EVERYWHERE, **config.execution.environment}


def cancel_left_over(work: Path) -> None:
    """Cancel what an attempt that died may have left in a cluster; returns when it is gone.

    Raises `TransientError` when the cluster does not answer: two jobs must not work in one folder.
    """
    folder = JobFolder.of(work)
    order = folder.order()
    if order:
        jobs_of(folder, order).cancel()


class ClusterProcess:
    """The program that follows the job (the agent) under the supervisor. It cancels the job when it is ended.

    Should it be killed, this process cancels the job in its place; should all be killed, the job misses its heartbeat.
    """

    def __init__(self, work: Path, cancel: Callable[[Path], None], grace_s: float) -> None:
        """cancel: ends the jobs of a work folder. grace_s: what that may take."""
        self._work = work
        self._cancel = cancel
        environment = {**os.environ, "PYTHONPATH": str(local.code_folder()), "PYTHONUNBUFFERED": "1"}
        with (work / LOG_FILE).open("ab") as log:
            command = [sys.executable, "-m", "flows.launch.agent", str(work)]
            self._agent = Supervised(command, environment=environment, output=log, grace_s=grace_s)
        self.token = self._agent.token
        self._is_over = False

    def poll(self) -> int | None:
        """Exit code, or None while the stage waits or runs."""
        code = self._agent.poll()
        if code is not None:
            self._cancel_once()
        return code

    def stop(self) -> None:
        """Cancel the job; returns when nothing is left."""
        self._agent.stop()
        self._cancel_once()

    def _cancel_once(self) -> None:
        if self._is_over:
            return
        self._is_over = True
        try:
            self._cancel(self._work)
        except LifecycleError as error:
            JobFolder.of(self._work).report("warning", f"a job may be left in the cluster, and ends itself: {error}")
