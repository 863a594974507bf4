"""Options of the launcher `kubernetes` in a recipe (`execution.kubernetes`), also used in manifests of servers."""

from collections.abc import Iterator
from typing import Annotated, ClassVar, Literal

from pydantic import AfterValidator, Field, JsonValue, PositiveFloat, ValidationError

from stages.core.fields import what_is_wrong
from stages.core.launchers.launcher import ClusterOptions

KubernetesName = Annotated[str, Field(pattern=r"^[a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?$")]
SecretKey = Annotated[str, Field(pattern=r"^[a-z0-9]([a-z0-9.-]*[a-z0-9])?/[-._a-zA-Z0-9]+$")]

# Kubernetes takes no letters beyond ASCII; `\w` has them, and repeated 61 times it took 40 ms of every command's start.
LabelName = Annotated[
    str, Field(pattern=r"^([a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?/)?[A-Za-z0-9]([A-Za-z0-9_.-]{0,61}[A-Za-z0-9])?$")
]
LabelValue = Annotated[str, Field(pattern=r"^([A-Za-z0-9]([A-Za-z0-9_.-]{0,61}[A-Za-z0-9])?)?$")]
OUR_LABELS = ("llm-lifecycle.io/", "app.kubernetes.io/name", "batch.kubernetes.io/", "jobset.sigs.k8s.io/")
"""Beginnings of labels that a recipe may not set: the launcher and the cluster find pods by them."""
OURS = frozenset(
    {
        *("activeDeadlineSeconds", "automountServiceAccountToken", "containers", "enableServiceLinks", "hostname"),
        *("ephemeralContainers", "hostIPC", "hostNetwork", "hostPID", "hostUsers", "hostnameOverride"),
        *("initContainers", "nodeSelector", "restartPolicy", "securityContext", "serviceAccount", "volumes"),
        *("serviceAccountName", "shareProcessNamespace", "subdomain", "terminationGracePeriodSeconds"),
    }
)
"""Fields of a PodSpec that a recipe may not set, because the launcher sets them or they would break or open the pod."""
IN_TRAIN_JOBS = frozenset({"affinity", "imagePullSecrets", "schedulingGates", "tolerations"})
"""Fields of a PodSpec that a TrainJob can set in its runtime's pods, but for those that the launcher sets."""


def _check_labels(labels: dict[str, str]) -> dict[str, str]:
    for name in labels:
        if name.startswith(OUR_LABELS):
            raise ValueError(f"{name} is set by the launcher or the cluster; remove it")
    return labels


def _check_pod(pod: dict[str, JsonValue]) -> dict[str, JsonValue]:
    """Return fields of a pod, checked by the client's own model of a PodSpec. Raises ValueError for all others."""
    if not pod:
        return pod
    for name in OURS & pod.keys():
        raise ValueError(f"{name} is set by the launcher, or not for recipes; remove it")
    from kubernetes.client.models.v1_pod_spec import V1PodSpec  # 0.5 s, for the recipes that have such fields

    whole = {**pod, "containers": []}
    try:
        read = V1PodSpec.model_validate(whole, strict=True).model_dump(by_alias=True, exclude_unset=True)
    except ValidationError as error:
        raise ValueError(f"no fields of a Kubernetes PodSpec: {what_is_wrong(error)}") from error
    for name in sorted(pod):
        if read.get(name) != pod[name]:  # the client takes Python's names too, which Kubernetes does not
            raise ValueError(f"{name}: expected the names that Kubernetes' manifests have, such as priorityClassName")
    return pod


class KubernetesOptions(ClusterOptions):
    """Options of a stage's pods in Kubernetes: image, resources, secrets and the kind of job."""

    DESCRIBES_SERVERS: ClassVar[bool] = True

    image: str | None = Field(
        None, description="Container image with this pipeline, best named by its digest; required."
    )
    store_claim: KubernetesName | None = Field(
        "llm-lifecycle-home",
        description="PersistentVolumeClaim of the volume that holds `LIFECYCLE_HOME`; null: files pass through "
        "the bucket of `store.yaml`.",
    )
    namespace: KubernetesName = Field("default", description="Kubernetes namespace of the pods.")
    service_account: KubernetesName = Field(
        "llm-lifecycle-stage", description="Kubernetes service account of the pods; it needs no permissions."
    )
    job: Literal["train_job", "indexed_job"] = Field(
        "train_job",
        description="Job for training over several nodes: Kubeflow Trainer's TrainJob, or an indexed Kubernetes Job.",
    )
    training_runtime: KubernetesName = Field(
        "torch-distributed", description="Name of the ClusterTrainingRuntime that a TrainJob refers to."
    )
    gpu_resource: str = Field(
        "nvidia.com/gpu", description="Kubernetes resource name under which the cluster offers GPUs."
    )
    shared_memory_gib: PositiveFloat = Field(
        8.0, description="Shared memory (/dev/shm) of each pod in GiB, which NCCL needs."
    )
    secrets: dict[str, SecretKey] = Field(
        default_factory=dict,
        description="Environment variables from Kubernetes Secrets: name: SECRET/KEY, such as {HF_TOKEN: hub/token}.",
    )
    node_selector: dict[str, str] = Field(
        default_factory=dict, description="Labels that a node must have to run the pods."
    )
    labels: Annotated[dict[LabelName, LabelValue], AfterValidator(_check_labels)] = Field(
        default_factory=dict,
        description="Labels of the job and its pods, such as {kueue.x-k8s.io/queue-name: research}.",
    )
    pod: Annotated[dict[str, JsonValue], AfterValidator(_check_pod)] = Field(
        default_factory=dict,
        description="Further fields of the pods' PodSpec: affinity, tolerations, priorityClassName, ….",
    )

    @property
    def shares_home(self) -> bool:
        return self.store_claim is not None

    def problems(self, nodes: int) -> Iterator[str]:
        if not self.image:
            yield "image: missing; name the image that holds this pipeline"
        if nodes > 1 and not self.shares_home:
            yield "store_claim: null takes one node; several share a volume"
        if nodes > 1 and self.job == "train_job":
            for name in sorted(self.pod.keys() - IN_TRAIN_JOBS):
                yield f"pod: {name} cannot be set in a TrainJob; set it in its training runtime, or job: indexed_job"
