"""How a cluster's job ended → whether it goes on, is done, or has failed, and with which error. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from flows.launch.job_folder import JobEnd, JobOrder
from flows.launch.slurm_client import JobView
from stages.errors import LifecycleError, ResourceError, StageCrashError, StageTimeoutError

INTERRUPTIONS = {
    "TIMEOUT": "its time limit",
    "PREEMPTED": "a preemption",
    "NODE_FAIL": "the failure of a node",
    "BOOT_FAIL": "the failure of a node to boot",
}
KILLED = frozenset({"CANCELLED", "REVOKED", "OUT_OF_MEMORY", "DEADLINE"})
OVER = frozenset({"COMPLETED", "FAILED", *INTERRUPTIONS, *KILLED})
"""States of Slurm in which a job will never run again."""


@dataclass(frozen=True)
class Interrupted:
    """The job is over, the stage is not: another job continues from the last checkpoint. `by`: what ended the job."""

    by: str
    by_time_limit: bool = False


@dataclass(frozen=True)
class Finished:
    """The stage's processes ended by themselves; what they left says the rest."""

    exit_code: int


@dataclass(frozen=True)
class Failed:
    """The cluster ended the stage."""

    error: LifecycleError


Verdict = Interrupted | Finished | Failed


def verdict(view: JobView | None, end: JobEnd | None, order: JobOrder, job_id: str) -> Verdict:
    """view: the ended job, None when Slurm has forgotten it. end: what its batch step noted, if it could."""
    if view and view.state in INTERRUPTIONS:
        return Interrupted(INTERRUPTIONS[view.state], by_time_limit=view.state == "TIMEOUT")
    if view and view.state in KILLED:
        return Failed(_error_of(view, order, job_id))
    if end and end.exit_code is not None:
        return Finished(end.exit_code)
    if end:  # told to end, and by nobody else
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
    state = f"ended as {view.state} ({view.reason}, exit code {view.exit_code})" if view else "is unknown to Slurm"
    return StageCrashError(
        f"Slurm job {job_id} of {order.stage} {state} before its first process could say a word; check that the nodes "
        f"see {order.work} and this Python environment under the same paths"
    )
