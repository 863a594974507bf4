"""Launching of a stage as a cluster job, on Slurm, Kubernetes or Ray, and the registry of such launchers.

The home has the same path here and on the nodes: on a disk that they share, or on one of their own, whose files come
and go through a bucket. So has this code with Slurm and Ray; with Kubernetes it is in the image. The job's output,
metrics and events go to the files of the work folder.
"""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

from flows.launch import kubernetes, local, ray, slurm
from flows.launch.cluster_job import BUCKET_PATIENCE_S, HEARTBEAT_PATIENCE_S, Cluster, JobFolder, JobOrder
from flows.ledger.home import home
from flows.store.content import LOG_FILE
from flows.store.remote import job_store
from stages.core.contract import StageConfig, StageInput
from stages.core.errors import LifecycleError
from stages.core.launchers.registry import LauncherBlocks
from stages.core.supervised import SupervisedProcess

CLUSTERS: dict[str, Cluster] = {"slurm": slurm.CLUSTER, "kubernetes": kubernetes.CLUSTER, "ray": ray.CLUSTER}
"""Cluster launchers by name. A new launcher is a module, a line here, and its options in `stages/core/launchers/`."""
CANCEL_GRACE_S = 40.0
"""Seconds given to the program that follows a cluster job for cancelling the job, before the program is killed."""
FETCH_GRACE_S = 60.0
"""Further seconds for receiving from a bucket what the cancelled job has sent at its end."""


def start(
    work: Path,
    config: StageConfig,
    *,
    stage_command: list[str] | None = None,
    heartbeat_patience_s: float | None = None,
) -> ClusterProcess:
    """Submit the stage of a work folder to a cluster, as its `config.json` says.

    stage_command: arguments of Python, by default those that run the stage. heartbeat_patience_s: a job that receives
    no heartbeat for this long ends itself; None takes the launcher's default. Raises RecipeError as `job_store`.
    """
    name = StageInput.model_validate_json((work / "config.json").read_bytes()).name
    order = order_of(name, work, config, stage_command or ["-m", "stages", str(work)], heartbeat_patience_s)
    environment = {**CLUSTERS[order.launcher].environment(), **local.EVERYWHERE, **config.execution.environment}
    JobFolder.of(work).write(order, environment)
    (work / LOG_FILE).touch(mode=0o600)
    return ClusterProcess(work, CANCEL_GRACE_S + (FETCH_GRACE_S if order.through else 0.0))


def order_of(
    name: str, work: Path, config: StageConfig, stage_command: list[str], heartbeat_patience_s: float | None = None
) -> JobOrder:
    """Return the description of a stage's cluster job, with a job name that no other job has."""
    execution, through = config.execution, job_store(name, config, home())
    # Kubernetes wants names that are labels of DNS, with room for the suffixes of pods.
    label = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")[:30]
    return JobOrder(
        job=f"lifecycle-{label}-{os.urandom(6).hex()}",
        stage=name,
        work=work,
        home=home(),
        stage_command=stage_command,
        nodes=execution.nodes,
        threads=execution.threads,
        network_interface=execution.network_interface,
        processes=config.processes,
        interruptions_without_progress=execution.retries,
        heartbeat_patience_s=heartbeat_patience_s or (BUCKET_PATIENCE_S if through else HEARTBEAT_PATIENCE_S),
        through=through,
        **{field: getattr(execution, field) for field in LauncherBlocks.model_fields},
    )


def cancel_left_over(work: Path) -> None:
    """Cancel cluster jobs that a killed run of the stage may have left; return when they are gone.

    Raises `TransientError` when the cluster does not answer: two jobs must not work in one folder.
    """
    folder = JobFolder.of(work)
    order = folder.order()
    if order:
        CLUSTERS[order.launcher].connect(folder, order).cancel()


class ClusterProcess:
    """Stage that runs on a cluster, represented by a local program that submits and follows the stage's jobs.

    The agent cancels the job when it is ended. If the agent is killed, this object does; if both are, the job ends
    itself, because it receives no heartbeats.
    """

    def __init__(self, work: Path, grace_s: float) -> None:
        self._work = work
        environment = {**os.environ, "PYTHONPATH": str(local.code_folder()), "PYTHONUNBUFFERED": "1"}
        with (work / LOG_FILE).open("ab") as log:
            command = [sys.executable, "-m", "flows.launch.agent", str(work)]
            self._agent = SupervisedProcess(command, environment=environment, output=log, grace_s=grace_s)
        self.token = self._agent.token
        self._is_over = False

    def poll(self) -> int | None:
        code = self._agent.poll()
        if code is not None:
            self._cancel_once()
        return code

    def stop(self) -> None:
        self._agent.stop()
        self._cancel_once()

    def _cancel_once(self) -> None:
        if self._is_over:
            return
        self._is_over = True
        try:
            cancel_left_over(self._work)
        except LifecycleError as error:
            JobFolder.of(self._work).report("warning", f"a job may be left in the cluster, and ends itself: {error}")
