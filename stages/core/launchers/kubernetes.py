"""Options of the launcher `kubernetes` in a recipe (`execution.kubernetes`), also used in manifests of servers."""

from collections.abc import Iterator
from typing import Annotated, ClassVar, Literal

from pydantic import Field, PositiveFloat

from stages.core.launchers.launcher import ClusterOptions

KubernetesName = Annotated[str, Field(pattern=r"^[a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?$")]
SecretKey = Annotated[str, Field(pattern=r"^[a-z0-9]([a-z0-9.-]*[a-z0-9])?/[-._a-zA-Z0-9]+$")]


class KubernetesOptions(ClusterOptions):
    """Options of a stage's pods in Kubernetes: image, resources, secrets and the kind of job."""

    DESCRIBES_SERVERS: ClassVar[bool] = True

    image: str | None = Field(
        None, description="Container image with this pipeline, best named by its digest; required."
    )
    store_claim: KubernetesName = Field(
        "llm-lifecycle-home", description="PersistentVolumeClaim of the volume that holds `LIFECYCLE_HOME`."
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

    def problems(self) -> Iterator[str]:
        if not self.image:
            yield "image: missing; name the image that holds this pipeline"
