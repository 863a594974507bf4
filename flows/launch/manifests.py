"""Kubernetes manifests of a stage's job, as nested dicts. Pure functions of the job's description.

For one node: a Job. For several: a TrainJob of Kubeflow Trainer (v1alpha1, with runtime patches: 2.2 and later), or an
indexed Job whose pods find the first one through a headless Service; and a NetworkPolicy. Pods satisfy the "restricted"
Pod Security Standard, hold no token of the API, and can write only to the home's volume, /tmp and shared memory.
"""

from pathlib import Path
from typing import Any

from flows.launch.cluster_job import JobFolder, JobOrder
from stages.core.launchers.kubernetes import KubernetesOptions

Manifest = dict[str, Any]

USER_ID = 1000
PORTS = range(20_000, 30_000)
"""Ports for the rendezvous of a job's processes, below the range that Linux assigns to outgoing connections."""
FIELD_MANAGER = "llm-lifecycle.io/launcher"
JOB_LABEL = "llm-lifecycle.io/job"
STAGE_LABEL = "llm-lifecycle.io/stage"
TRAINER_CONTAINER = "node"
"""Name that Kubeflow's training runtimes give to the trainer's container and to the replicated job around it."""

CONTAINER_SECURITY = {
    "allowPrivilegeEscalation": False,
    "readOnlyRootFilesystem": True,
    "capabilities": {"drop": ["ALL"]},
}
POD_SECURITY = {
    "runAsNonRoot": True,
    "runAsUser": USER_ID,
    "runAsGroup": USER_ID,
    "fsGroup": USER_ID,
    "fsGroupChangePolicy": "OnRootMismatch",
    "seccompProfile": {"type": "RuntimeDefault"},
}


def job_manifests(order: JobOrder) -> list[Manifest]:
    """Return the manifests of all Kubernetes objects of one stage's job, the job itself last."""
    if order.nodes == 1:
        return [_job(order, {})]
    if order.block(KubernetesOptions).job == "train_job":
        return [_network_policy(order), _train_job(order)]
    address = {"MASTER_ADDR": f"{order.job}-0.{order.job}", "MASTER_PORT": str(_port(order))}
    return [_network_policy(order), _headless_service(order), _job(order, address)]


def _job(order: JobOrder, address: dict[str, str]) -> Manifest:
    """Return a Kubernetes Job with one pod, or for several nodes an indexed Job with one pod for each."""
    pod = {**pod_spec(order, address), "restartPolicy": "Never"}
    spec: Manifest = {
        # The agent decides whether a stage is tried again.
        "backoffLimit": 0,
        # A pod that is still ending may write to the work folder, so no replacement starts before it is gone.
        "podReplacementPolicy": "Failed",
        # For a job whose agent was killed: all others are deleted by theirs.
        "ttlSecondsAfterFinished": 3600,
        "completions": order.nodes,
        "parallelism": order.nodes,
        "template": {"metadata": {"labels": _labels(order)}, "spec": pod},
    }
    if order.nodes > 1:
        spec["completionMode"] = "Indexed"
        # With the Service of this name, a pod is called JOB-INDEX.JOB.
        pod["subdomain"] = order.job
    return {"apiVersion": "batch/v1", "kind": "Job", "metadata": _metadata(order), "spec": spec}


def _port(order: JobOrder) -> int:
    """Return the rendezvous port of a job, derived from the random part of its name so that jobs differ."""
    return PORTS[int(order.job.rpartition("-")[2], base=16) % len(PORTS)]


def _network_policy(order: JobOrder) -> Manifest:
    """Return a NetworkPolicy by which only the job's own pods reach its pods: training processes use no key.

    It has an effect only where the cluster's network supports policies.
    """
    own = {"matchLabels": {JOB_LABEL: order.job}}
    spec = {"podSelector": own, "policyTypes": ["Ingress"], "ingress": [{"from": [{"podSelector": own}]}]}
    version = "networking.k8s.io/v1"
    return {"apiVersion": version, "kind": "NetworkPolicy", "metadata": _metadata(order), "spec": spec}


def _headless_service(order: JobOrder) -> Manifest:
    """Return a headless Service, by which the job's pods find one another by name before they are ready."""
    spec = {
        "clusterIP": "None",
        "publishNotReadyAddresses": True,
        "selector": {JOB_LABEL: order.job},
        "ports": [{"name": "rendezvous", "port": _port(order)}],
    }
    return {"apiVersion": "v1", "kind": "Service", "metadata": _metadata(order), "spec": spec}


def _train_job(order: JobOrder) -> Manifest:
    """Return a Kubeflow TrainJob that runs the stage on several nodes; its runtime sets `PET_…` for the rendezvous.

    Image, command and resources belong to its trainer; all else is a patch of the runtime.
    """
    pod = pod_spec(order, {})
    (container,) = pod.pop("containers")
    unpatchable = ("enableServiceLinks", "automountServiceAccountToken")  # a runtime patch has no such fields
    pod = {name: value for name, value in pod.items() if name not in unpatchable}
    patched = {name: container[name] for name in ("volumeMounts", "securityContext")}
    pod["containers"] = [{"name": TRAINER_CONTAINER, **patched}]
    template = {"metadata": {"labels": _labels(order)}, "spec": pod}
    replicated = {"name": TRAINER_CONTAINER, "template": {"spec": {"template": template}}}
    spec = {
        "runtimeRef": {"name": order.block(KubernetesOptions).training_runtime},
        "trainer": {
            "image": container["image"],
            "command": container["command"],
            "numNodes": order.nodes,
            "numProcPerNode": order.processes,
            "env": container["env"],
            "resourcesPerNode": container["resources"],
        },
        "runtimePatches": [
            {
                "manager": FIELD_MANAGER,
                "trainingRuntimeSpec": {"template": {"spec": {"replicatedJobs": [replicated]}}},
            }
        ],
    }
    version = "trainer.kubeflow.org/v1alpha1"
    return {"apiVersion": version, "kind": "TrainJob", "metadata": _metadata(order), "spec": spec}


def pod_spec(order: JobOrder, environment: dict[str, str]) -> Manifest:
    """Return the specification of a pod that runs one node's processes of the stage (`node_task`).

    Secrets are referenced by name, never copied; all other environment lies in the home, or comes from the bucket.
    """
    asked = order.block(KubernetesOptions)
    # The root file system is read-only.
    plain = {"HOME": "/tmp", **environment}  # noqa: S108 (a volume)
    program = ["flows.launch.node_task", str(JobFolder.of(order.work).path)]
    if order.through:
        plain["LIFECYCLE_HOME"] = str(order.home)
        program = ["flows.launch.away_task", order.through, order.job]
    variables = [{"name": name, "value": value} for name, value in plain.items()]
    container = {
        "name": "stage",
        "image": asked.image,
        "command": ["python", "-m", *program],
        "env": [*variables, *environment_by_reference(asked.secrets)],
        "resources": resources(asked, order.cores_per_node),
        "securityContext": CONTAINER_SECURITY,
        "volumeMounts": volume_mounts(order.home, read_only=False),
    }
    spec: Manifest = {
        "serviceAccountName": asked.service_account,
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "terminationGracePeriodSeconds": 30,
        "securityContext": POD_SECURITY,
        "containers": [container],
        "volumes": volumes(asked),
    }
    if asked.node_selector:
        spec["nodeSelector"] = asked.node_selector
    return {**spec, **asked.pod}


def resources(asked: KubernetesOptions, cores: int) -> Manifest:
    """Return a container's requests and limits: memory and GPUs are guaranteed, cores have no limit."""
    limits: Manifest = {}
    if asked.memory_gib_per_node:
        limits["memory"] = _gib(asked.memory_gib_per_node)
    if asked.gpus_per_node:
        limits[asked.gpu_resource] = str(asked.gpus_per_node)
    return {"requests": {"cpu": str(asked.cpus_per_node or cores), **limits}, "limits": limits}


def volumes(asked: KubernetesOptions) -> list[Manifest]:
    """Return the volumes of a pod: the lifecycle home, and the other places that containers may write to."""
    shared_memory = {"medium": "Memory", "sizeLimit": _gib(asked.shared_memory_gib)}
    home: Manifest = (
        {"persistentVolumeClaim": {"claimName": asked.store_claim}} if asked.shares_home else {"emptyDir": {}}
    )
    return [
        {"name": "home", **home},
        {"name": "tmp", "emptyDir": {}},
        {"name": "shared-memory", "emptyDir": shared_memory},
    ]


def volume_mounts(home: Path, *, read_only: bool) -> list[Manifest]:
    """Return a container's volume mounts; the lifecycle home keeps its path, which records contain."""
    return [
        {"name": "home", "mountPath": str(home), "readOnly": read_only},
        {"name": "tmp", "mountPath": "/tmp"},  # noqa: S108 (a volume)
        {"name": "shared-memory", "mountPath": "/dev/shm"},  # noqa: S108 (a volume)
    ]


def environment_by_reference(secrets: dict[str, str]) -> list[Manifest]:
    """Return container variables whose values Kubernetes reads from Secrets. secrets: `NAME/KEY` of each variable."""
    variables = []
    for variable, reference in secrets.items():
        name, _, key = reference.partition("/")
        variables.append({"name": variable, "valueFrom": {"secretKeyRef": {"name": name, "key": key}}})
    return variables


def _metadata(order: JobOrder) -> Manifest:
    namespace = order.block(KubernetesOptions).namespace
    return {"name": order.job, "namespace": namespace, "labels": _labels(order)}


def _labels(order: JobOrder) -> dict[str, str]:
    own = {"app.kubernetes.io/name": "llm-lifecycle", JOB_LABEL: order.job, STAGE_LABEL: order.stage}
    return {**order.block(KubernetesOptions).labels, **own}


def _gib(amount: float) -> str:
    return f"{round(amount * 1024)}Mi"
