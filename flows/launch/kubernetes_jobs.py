"""Kubernetes jobs of one stage: created, observed and deleted through the official Python client.

Only the agent imports this module, and only for this launcher: the client is heavy. Objects are trees of dicts.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Literal

from kubernetes import client, config
from kubernetes.client.exceptions import ApiException
from kubernetes.config import ConfigException
from urllib3.exceptions import HTTPError

from flows.launch.cluster_job import Failed, Finished, Interrupted, JobFolder, JobOrder, JobOutcome, Running, Waiting
from flows.launch.failures import INTERRUPTED
from flows.launch.manifests import JOB_LABEL, Manifest, job_manifests
from stages.core.errors import RecipeError, ResourceError, StageCrashError, TransientError
from stages.core.launchers.kubernetes import KubernetesOptions

STARTING = frozenset({"ContainerCreating", "PodInitializing"})
"""Reasons that Kubernetes gives for containers that are about to run. The user need not be informed of these."""
REQUEST_TIMEOUT_S = 30.0
DELETE_PATIENCE_S = 60.0
POLL_INTERVAL_S = 0.5
NOT_FOUND = 404
COLLECTIONS = {
    "Job": "/apis/batch/v1/namespaces/{namespace}/jobs",
    "Service": "/api/v1/namespaces/{namespace}/services",
    "NetworkPolicy": "/apis/networking.k8s.io/v1/namespaces/{namespace}/networkpolicies",
    "TrainJob": "/apis/trainer.kubeflow.org/v1alpha1/namespaces/{namespace}/trainjobs",
    "Pod": "/api/v1/namespaces/{namespace}/pods",
}
QUEUED = "/apis/kueue.x-k8s.io/{version}/namespaces/{namespace}/workloads"
QUEUE_VERSIONS = ("v1beta2", "v1beta1")
"""Versions of Kueue's API, in which a suspended job's place in its queue is looked up; older clusters have the last."""


class KubernetesJobs:
    """Client that submits, observes and deletes the Kubernetes job of one stage."""

    def __init__(self, folder: JobFolder, order: JobOrder, api: client.ApiClient) -> None:
        self.folder = folder
        self.order = order
        self._api = api
        self._name = order.job
        self._namespace = order.block(KubernetesOptions).namespace
        self._manifests = {manifest["kind"]: manifest for manifest in job_manifests(order)}
        self._kind = list(self._manifests)[-1]

    @classmethod
    def connect(cls, folder: JobFolder, order: JobOrder) -> KubernetesJobs:
        """Return a client that uses the pod's service account, or else the current context of the user's kubeconfig."""
        try:
            config.load_incluster_config()
        except ConfigException:
            try:
                config.load_kube_config(os.environ.get("KUBECONFIG"))
            except ConfigException as error:
                remedy = "run this in a pod with a service account, or name a cluster in KUBECONFIG"
                raise ResourceError(f"looking for Kubernetes: {error}; {remedy}") from error
        return cls(folder, order, client.ApiClient())

    def submit(self) -> str:
        """Create the Kubernetes objects of the stage's job and return the job's name.

        Raises `RecipeError` or `ResourceError` when Kubernetes refuses it, `TransientError` when it does not answer.
        """
        self.folder.claim(self._name)
        for kind, manifest in self._manifests.items():
            with _explained(f"create the {kind} {self._name}"):
                self._ask("POST", kind, body=manifest)
        return self._name

    def look(self, job_id: str) -> JobOutcome | Waiting | Running:
        with _explained(f"look at the {self._kind} {self._name}"):
            job = self._find(self._kind)
            pods = self._pods()
        if job is None:
            event = f"{self.name_of(job_id)} of {self.order.stage} was deleted by somebody else"
            return Failed(StageCrashError(f"{event}; run again to continue from the last checkpoint"))
        state = outcome(job, pods, self.order)
        reason = self._queued(job) if isinstance(state, Waiting) and _condition(job, "Suspended") else None
        return Waiting(reason) if reason else state

    def name_of(self, job_id: str) -> str:
        return f"Kubernetes {self._kind} {self._namespace}/{job_id}"

    def cancel(self) -> bool:
        end_s = time.monotonic() + DELETE_PATIENCE_S
        with _explained(f"delete the {self._kind} {self._name}"):
            # The job first, whose pods need the Service and the policy to their end.
            for kind in reversed(self._manifests):
                self._delete(kind)
            while any(self._find(kind) for kind in self._manifests) or self._pods():
                if time.monotonic() > end_s:
                    return False
                time.sleep(POLL_INTERVAL_S)
        return True

    def _find(self, kind: str) -> Manifest | None:
        """Return an object of the stage's job (Job, Service, …) as Kubernetes has it; None when it does not exist."""
        try:
            return self._ask("GET", kind, self._name)
        except ApiException as error:
            if error.status == NOT_FOUND:
                return None
            raise

    def _delete(self, kind: str) -> None:
        try:
            # Foreground: the object stays until its pods are gone, so that `_find` sees them.
            self._ask("DELETE", kind, self._name, query={"propagationPolicy": "Foreground"})
        except ApiException as error:
            if error.status != NOT_FOUND:
                raise

    def _pods(self) -> list[Manifest]:
        return self._ask("GET", "Pod", query={"labelSelector": f"{JOB_LABEL}={self._name}"})["items"]

    def _queued(self, job: Manifest) -> str | None:
        """Return why Kueue has not admitted a suspended job, in its words; None without Kueue or a right to ask."""
        selector = {"labelSelector": f"kueue.x-k8s.io/job-uid={job['metadata'].get('uid', '')}"}
        for version in QUEUE_VERSIONS:
            path = QUEUED.format(version=version, namespace=self._namespace)
            try:
                workloads = self._request("GET", path, query=selector)["items"]
            except (ApiException, HTTPError):  # the job's own state is known, and waits as well
                continue
            return next((reason for workload in workloads if (reason := _reason_in_queue(workload))), None)
        return None

    def _ask(
        self,
        method: Literal["GET", "POST", "DELETE"],
        kind: str,
        name: str | None = None,
        *,
        query: Mapping[str, str] | None = None,
        body: Manifest | None = None,
    ) -> Manifest:
        """Send a request about a kind of object, as trees instead of the client's classes; return the response."""
        path = COLLECTIONS[kind].format(namespace=self._namespace) + (f"/{name}" if name else "")
        return self._request(method, path, query=query, body=body)

    def _request(
        self, method: str, path: str, *, query: Mapping[str, str] | None = None, body: Manifest | None = None
    ) -> Manifest:
        request = self._api.param_serialize(
            method=method,
            resource_path=path,
            query_params=list((query or {}).items()),
            header_params={"Accept": "application/json", "Content-Type": "application/json"},
            body=body,
            auth_settings=["BearerToken"],
        )
        response = self._api.call_api(*request, _request_timeout=REQUEST_TIMEOUT_S)
        content = response.read()
        if not 200 <= response.status < 300:
            raise ApiException(status=response.status, reason=response.reason, body=content.decode(errors="replace"))
        return json.loads(content)


def outcome(job: Manifest, pods: list[Manifest], order: JobOrder) -> JobOutcome | Waiting | Running:
    """Return a job's state from its Job or TrainJob, with `status.conditions`, and from all its present pods."""
    # `SuccessCriteriaMet` and `FailureTarget` come while pods still end, `Complete` and `Failed` after that.
    if _condition(job, "Complete") or _condition(job, "SuccessCriteriaMet"):
        return Finished(0)
    failed = _condition(job, "Failed") or _condition(job, "FailureTarget")
    if failed:
        return _failure(failed, pods, order)
    suspended = _condition(job, "Suspended")
    if suspended:
        return Waiting(f"suspended: {suspended.get('message') or suspended.get('reason', 'by its queue')}")
    reasons = [reason for pod in pods if (reason := _reason_to_wait(pod))]
    if reasons:
        return Waiting(reasons[0])
    return Running() if pods else Waiting("it has no pods yet")


def _failure(failed: Manifest, pods: list[Manifest], order: JobOrder) -> JobOutcome:
    # Kubernetes sets it on pods that it evicts or preempts, or whose node is lost.
    disrupted = [condition for pod in pods if (condition := _condition(pod, "DisruptionTarget"))]
    if disrupted:
        return Interrupted(f"the loss of a pod ({disrupted[0].get('reason', 'disruption')})")
    ended = [(pod["metadata"]["name"], state) for pod in pods for state in _terminations(pod)]
    for name, state in ended:
        if state.get("reason") == "OOMKilled":
            remedy = "raise execution.kubernetes.memory_gib_per_node, or lower layout.micro_batch_size"
            return Failed(ResourceError(f"the pod {name} of {order.stage} took more memory than it may; {remedy}"))
    # Pods that were asked to end, because another pod had failed, come last: they are not the cause.
    codes = sorted((state["exitCode"] for _, state in ended if state["exitCode"]), key=lambda code: code == INTERRUPTED)
    if codes:
        return Finished(codes[0])
    reason = f"{failed.get('reason', 'Failed')}: {failed.get('message', '')}"
    return Failed(
        StageCrashError(f"the job {order.job} of {order.stage} failed before its first process ran: {reason}")
    )


def _reason_to_wait(pod: Manifest) -> str | None:
    """Return why a pod does not run yet, in Kubernetes' words; None when the pod is about to run."""
    scheduled = _condition(pod, "PodScheduled", status="False")
    if scheduled:
        return scheduled.get("message") or scheduled.get("reason", "Unschedulable")
    for container in pod.get("status", {}).get("containerStatuses", []):
        waiting = container.get("state", {}).get("waiting")
        if waiting and waiting.get("reason") not in STARTING:
            return f"{waiting.get('reason')}: {waiting.get('message', '')}"
    return None


def _reason_in_queue(workload: Manifest) -> str | None:
    """Return the message of the first condition that a Workload of Kueue lacks: its quota, then its admission."""
    missing = (_condition(workload, kind, status="False") for kind in ("QuotaReserved", "Admitted"))
    found = next((condition for condition in missing if condition), None)
    queue = workload.get("spec", {}).get("queueName", "?")
    return f"in the queue {queue}: {found.get('message') or found.get('reason')}" if found else None


def _terminations(pod: Manifest) -> Iterator[dict[str, Any]]:
    for container in pod.get("status", {}).get("containerStatuses", []):
        terminated = container.get("state", {}).get("terminated")
        if terminated:
            yield terminated


def _condition(thing: Manifest, kind: str, status: str = "True") -> Manifest | None:
    # Null or absent in a new object.
    conditions = thing.get("status", {}).get("conditions") or []
    return next((item for item in conditions if item["type"] == kind and item["status"] == status), None)


@contextmanager
def _explained(doing: str) -> Iterator[None]:
    """Turn exceptions of the Kubernetes client into this project's errors; `doing` names the action in the message."""
    try:
        yield
    except HTTPError as error:
        raise TransientError(f"Kubernetes does not answer, asked to {doing}: {error}") from error
    except ApiException as error:
        raise _error_of(error, doing) from error


def _error_of(error: ApiException, doing: str) -> RecipeError | ResourceError | TransientError:
    status, message = error.status or 0, _message_of(error)
    if status in (401, 403):
        return ResourceError(f"Kubernetes does not let us {doing}: {message}; see deploy/kubernetes/rbac.yaml")
    if status == NOT_FOUND:
        remedy = "create the namespace; for a TrainJob install Kubeflow Trainer, or set kubernetes.job: indexed_job"
        return ResourceError(f"Kubernetes cannot {doing}: {message}; {remedy}")
    if status in (400, 422):
        return RecipeError(f"Kubernetes refused to {doing}: {message}; see execution.kubernetes of the stage")
    return TransientError(f"Kubernetes could not {doing}: {message}")


def _message_of(error: ApiException) -> str:
    """Return the message in an error response of Kubernetes, without the rest of its Status object."""
    try:
        return json.loads(error.body or "")["message"]
    except (ValueError, KeyError, TypeError):
        return f"{error.status} {error.reason}"
