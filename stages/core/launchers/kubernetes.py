"""Launcher `kubernetes`: the block `execution.kubernetes`, which also describes the servers of `lifecycle render`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, ClassVar, Literal

from pydantic import Field, PositiveFloat

from stages.core.launchers.launcher import ClusterOptions

KubernetesName = Annotated[str, Field(pattern=r"^[a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?$")]
SecretKey = Annotated[str, Field(pattern=r"^[a-z0-9]([a-z0-9.-]*[a-z0-9])?/[-._a-zA-Z0-9]+$")]


class KubernetesOptions(ClusterOptions):
    """Resources and settings of a stage's pods in Kubernetes."""

    DESCRIBES_SERVERS: ClassVar[bool] = True

    image: str | None = Field(None, description="Container image of the pipeline, best with its digest; required.")
    store_claim: KubernetesName = Field("llm-lifecycle-home", description="PersistentVolumeClaim of LIFECYCLE_HOME.")
    namespace: KubernetesName = Field("default", description="Namespace of the pods.")
    service_account: KubernetesName = Field(
        "llm-lifecycle-stage", description="Service account of the pods; it needs no rights."
    )
    job: Literal["train_job", "indexed_job"] = Field(
        "train_job", description="Training over several nodes: a TrainJob of Kubeflow Trainer, or an indexed Job."
    )
    training_runtime: KubernetesName = Field("torch-distributed", description="ClusterTrainingRuntime of a TrainJob.")
    gpu_resource: str = Field("nvidia.com/gpu", description="Name of the resource that counts GPUs.")
    shared_memory_gib: PositiveFloat = Field(8.0, description="Shared memory of each pod; NCCL needs it.")
    secrets: dict[str, SecretKey] = Field(
        default_factory=dict, description="Environment variable → Secret and key: {HF_TOKEN: hub/token}."
    )
    node_selector: dict[str, str] = Field(default_factory=dict, description="Labels that a node must have.")

    def problems(self) -> Iterator[str]:
        if not self.image:
            yield "image: missing; name the image that holds this pipeline"
