"""The jobs of one stage in Slurm, and what Slurm's words for them mean."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from flows.launch import local, slurm_client
from flows.launch.job_folder import JobEnd, JobFolder, JobOrder
from flows.launch.job_outcome import Failed, Finished, Interrupted, JobOutcome, Running, Waiting
from flows.launch.slurm_client import JobView
from flows.store.content import LOG_FILE
from stages.core.errors import LifecycleError, ResourceError, StageCrashError, StageTimeoutError
from stages.core.supervised import was_killed

SCRIPT = Path(__file__).with_name("slurm_job.sh")
CANCEL_PATIENCE_S = 30.0
INTERRUPTIONS = {
    "TIMEOUT": "its time limit",
    "PREEMPTED": "a preemption",
    "NODE_FAIL": "the failure of a node",
    "BOOT_FAIL": "the failure of a node to boot",
}
KILLED = frozenset({"CANCELLED", "REVOKED", "OUT_OF_MEMORY", "DEADLINE"})
OVER = frozenset({"COMPLETED", "FAILED", *INTERRUPTIONS, *KILLED})
"""States of Slurm in which a job will never run again."""


class SlurmJobs:
    """Submits the jobs of an order, one after another, looks at them, and cancels them."""

    def __init__(self, folder: JobFolder, order: JobOrder) -> None:
        self.folder = folder
        self.order = order

    def submit(self) -> str:
        """Returns the id of the job. Raises what `slurm_client.submit` raises."""
        return slurm_client.submit(sbatch_arguments(self.order, self.folder))

    def look(self, job_id: str) -> JobOutcome | Waiting | Running:
        """Raises `TransientError` when Slurm does not answer."""
        view = slurm_client.look(job_id)
        if view is None or view.state in OVER:
            return outcome(view, self.folder.end(job_id), self.order, job_id)
        if view.state in ("PENDING", "REQUEUED") and view.reason != "None":
            return Waiting(f"{view.reason}, after {view.restarts} restarts" if view.restarts else view.reason)
        return Running()

    def name_of(self, job_id: str) -> str:
        """For people."""
        return f"Slurm job {job_id}"

    def cancel(self) -> bool:
        """Returns whether no job is left. Raises `TransientError` when Slurm does not answer."""
        return slurm_client.cancel(self.order.job, CANCEL_PATIENCE_S)


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
    script = [SCRIPT, sys.executable, local.code_folder(), folder.path, os.environ.get("PATH", os.defpath)]
    chosen = [f"--{name}={value}" for name, value in options.items() if value]
    return ["--requeue", *chosen, *asked.options, *map(str, script)]


def outcome(view: JobView | None, end: JobEnd | None, order: JobOrder, job_id: str) -> JobOutcome:
    """view: the ended job, None when Slurm has forgotten it. end: what its batch step noted, if it could."""
    if view and view.state in INTERRUPTIONS:
        return Interrupted(INTERRUPTIONS[view.state], by_time_limit=view.state == "TIMEOUT")
    if view and view.state in KILLED:
        return Failed(_error_of(view, order, job_id))
    if end and end.exit_code is not None:
        return Finished(end.exit_code)
    if end:  # it got SIGTERM, and nobody else cancelled it
        return Interrupted(INTERRUPTIONS["TIMEOUT"], by_time_limit=True)
    return Failed(_unexplained(view, order, job_id))


def _error_of(view: JobView, order: JobOrder, job_id: str) -> LifecycleError:
    job = f"Slurm job {job_id} of {order.stage}"
    if view.state in ("CANCELLED", "REVOKED"):
        return StageCrashError(
            f"{job} was cancelled by somebody else (scancel); run again to continue from the last checkpoint"
        )
    if view.state == "OUT_OF_MEMORY":
        remedy = "raise execution.slurm.memory_gib_per_node, or lower layout.micro_batch_size"
        return ResourceError(f"{job} took more memory than it had asked for on {view.nodes}; {remedy}")
    return StageTimeoutError(f"{job} could not end before its deadline; see the options of execution.slurm")


def _unexplained(view: JobView | None, order: JobOrder, job_id: str) -> LifecycleError:
    signal_number = int(view.exit_code.partition(":")[2] or 0) if view else 0  # Slurm writes CODE:SIGNAL
    if view and was_killed(-signal_number):
        what = f"the batch step of Slurm job {job_id} of {order.stage} was killed by signal {signal_number}"
        return StageCrashError(f"{what} on {view.nodes}; run again to continue from the last checkpoint", died=True)
    state = f"ended as {view.state} ({view.reason}, exit code {view.exit_code})" if view else "is unknown to Slurm"
    return StageCrashError(
        f"Slurm job {job_id} of {order.stage} {state} before its first process ran; check that the nodes "
        f"see {order.work} and this Python environment under the same paths"
    )
