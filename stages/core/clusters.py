"""Recipe options of clusters: the `slurm` and `kubernetes` blocks of `execution`."""

from __future__ import annotations

import re
from typing import Annotated, Literal

from pydantic import AfterValidator, Field, PositiveFloat, PositiveInt

from stages.core.fields import StrictModel

OURS = frozenset(
    {
        *("array", "chdir", "comment", "error", "export", "export-file", "input", "job-name", "nodes", "no-requeue"),
        *("ntasks", "ntasks-per-node", "open-mode", "output", "parsable", "requeue", "signal", "test-only", "wait"),
        "wrap",
    }
)
"""Options of sbatch that the launcher sets itself or that would break it."""


def _check_option(option: str) -> str:
    name = re.fullmatch(r"--([a-z][a-z0-9-]*)(=.*)?", option)
    if not name:
        raise ValueError(f"{option!r} is no option of sbatch in the form --name or --name=value")
    if name[1] in OURS:
        raise ValueError(f"--{name[1]} is set by the launcher; remove it")
    return option


SbatchOption = Annotated[str, AfterValidator(_check_option)]
TimeLimit = Annotated[str, Field(pattern=r"^(\d+|\d+:\d\d|(\d+-)?\d+:\d\d:\d\d|\d+-\d+(:\d\d)?)$")]
KubernetesName = Annotated[str, Field(pattern=r"^[a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?$")]

SecretKey = Annotated[str, Field(pattern=r"^[a-z0-9]([a-z0-9.-]*[a-z0-9])?/[-._a-zA-Z0-9]+$")]


class SlurmOptions(StrictModel):
    """Resources of a stage's Slurm job; unset options have the cluster's defaults."""

    partition: str | None = Field(None, description="As `sbatch --partition`.")
    account: str | None = Field(None, description="As `sbatch --account`.")
    qos: str | None = Field(None, description="As `sbatch --qos`.")
    time_limit: TimeLimit | None = Field(
        None,
        description="As Slurm writes it: minutes, HH:MM:SS or D-HH:MM:SS. A job that reaches it continues in another.",
    )
    gpus_per_node: PositiveInt | None = Field(None, description="GPUs on each node.")
    cpus_per_node: PositiveInt | None = Field(None, description="Default: threads × processes of a node.")
    memory_gib_per_node: PositiveFloat | None = Field(None, description="Memory on each node.")
    warning_s: PositiveInt = Field(60, description="Seconds before its time limit at which a job is asked to end.")
    options: list[SbatchOption] = Field(default_factory=list, description="Further options, as in --constraint=h100.")


class KubernetesOptions(StrictModel):
    """Resources and settings of a stage's pods in Kubernetes."""

    image: str | None = Field(None, description="Required: the pipeline's image, best with its digest.")
    store_claim: KubernetesName = Field("llm-lifecycle-home", description="PersistentVolumeClaim of LIFECYCLE_HOME.")
    namespace: KubernetesName = Field("default", description="Namespace of the pods.")
    service_account: KubernetesName = Field(
        "llm-lifecycle-stage", description="Service account of the pods; it needs no rights."
    )
    job: Literal["train_job", "indexed_job"] = Field(
        "train_job", description="Training over several nodes: a TrainJob of Kubeflow Trainer, or an indexed Job."
    )
    training_runtime: KubernetesName = Field("torch-distributed", description="ClusterTrainingRuntime of a TrainJob.")
    gpus_per_node: PositiveInt | None = Field(None, description="GPUs on each node.")
    gpu_resource: str = Field("nvidia.com/gpu", description="Name of the resource that counts GPUs.")
    cpus_per_node: PositiveInt | None = Field(None, description="Default: threads × processes of a node.")
    memory_gib_per_node: PositiveFloat | None = Field(None, description="Memory on each node.")
    shared_memory_gib: PositiveFloat = Field(8.0, description="Shared memory of each pod; NCCL needs it.")
    secrets: dict[str, SecretKey] = Field(
        default_factory=dict, description="Environment variable → Secret and key: {HF_TOKEN: hub/token}."
    )
    node_selector: dict[str, str] = Field(default_factory=dict, description="Labels that a node must have.")
