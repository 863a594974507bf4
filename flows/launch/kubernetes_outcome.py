"""What the status of a Kubernetes Job or TrainJob and of its pods means for the stage. Pure; objects are trees."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from flows.launch.job_folder import JobOrder
from flows.launch.job_outcome import Failed, Finished, Interrupted, JobOutcome, Running, Waiting
from flows.launch.manifests import Manifest
from flows.launch.node_task import INTERRUPTED
from stages.core.errors import ResourceError, StageCrashError

STARTING = frozenset({"ContainerCreating", "PodInitializing"})
"""Reasons of containers that are about to run."""


def outcome(job: Manifest, pods: list[Manifest], order: JobOrder) -> JobOutcome | Waiting | Running:
    """job: with `status.conditions`; pods: all that the job has at the moment."""
    if _condition(job, "Complete") or _condition(job, "SuccessCriteriaMet"):
        return Finished(0)
    failed = _condition(job, "Failed") or _condition(job, "FailureTarget")
    if failed:
        return _failure(failed, pods, order)
    reasons = [reason for pod in pods if (reason := _reason_to_wait(pod))]
    if reasons:
        return Waiting(reasons[0])
    return Running() if pods else Waiting("it has no pods yet")


def _failure(failed: Manifest, pods: list[Manifest], order: JobOrder) -> JobOutcome:
    disrupted = [found for pod in pods if (found := _condition(pod, "DisruptionTarget"))]
    if disrupted:
        return Interrupted(f"the loss of a pod ({disrupted[0].get('reason', 'disruption')})")
    ended = [(pod["metadata"]["name"], state) for pod in pods for state in _terminations(pod)]
    for name, state in ended:
        if state.get("reason") == "OOMKilled":
            remedy = "raise execution.kubernetes.memory_gib_per_node, or lower layout.micro_batch_size"
            return Failed(ResourceError(f"the pod {name} of {order.stage} took more memory than it may; {remedy}"))
    # The pods that were asked to end, because another one had failed, have nothing to say.
    codes = sorted((state["exitCode"] for _, state in ended if state["exitCode"]), key=lambda code: code == INTERRUPTED)
    if codes:
        return Finished(codes[0])
    said = f"{failed.get('reason', 'Failed')}: {failed.get('message', '')}"
    return Failed(StageCrashError(f"the job {order.job} of {order.stage} failed before its first process ran: {said}"))


def _reason_to_wait(pod: Manifest) -> str | None:
    """Why a pod does not run yet, unless it is about to."""
    scheduled = _condition(pod, "PodScheduled", status="False")
    if scheduled:
        return scheduled.get("message") or scheduled.get("reason", "Unschedulable")
    for container in pod.get("status", {}).get("containerStatuses", []):
        waiting = container.get("state", {}).get("waiting")
        if waiting and waiting.get("reason") not in STARTING:
            return f"{waiting.get('reason')}: {waiting.get('message', '')}"
    return None


def _terminations(pod: Manifest) -> Iterator[dict[str, Any]]:
    for container in pod.get("status", {}).get("containerStatuses", []):
        terminated = container.get("state", {}).get("terminated")
        if terminated:
            yield terminated


def _condition(thing: Manifest, kind: str, status: str = "True") -> Manifest | None:
    conditions = thing.get("status", {}).get("conditions") or []
    return next((one for one in conditions if one["type"] == kind and one["status"] == status), None)
