"""Launcher `kubernetes` without the client for Kubernetes' API, which is imported only for use because that is slow."""

import os
from collections.abc import Mapping
from pathlib import Path

from flows.launch.cluster_job import Cluster, JobFolder, JobOrder, Jobs
from flows.launch.network import Rendezvous

SERVICE_ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount/token")


def connect(folder: JobFolder, order: JobOrder) -> Jobs:
    """Return the Kubernetes client for a stage's job. Only programs that submit or cancel jobs need it."""
    from flows.launch.kubernetes_jobs import KubernetesJobs

    return KubernetesJobs.connect(folder, order)


def way_in() -> str | None:
    """Return a text for `lifecycle doctor` that names the Kubernetes credentials; None where there are none."""
    config = os.environ.get("KUBECONFIG") or str(Path.home() / ".kube" / "config")
    files = [SERVICE_ACCOUNT, *map(Path, config.split(os.pathsep))]
    return next((f"jobs are created with {file}" for file in files if file.is_file()), None)


def rendezvous_of(environment: Mapping[str, str]) -> Rendezvous:
    """Return this pod's rank and the rendezvous address, from the variables of a TrainJob (PET_…) or an indexed Job."""
    if "PET_NODE_RANK" in environment:
        address = environment["PET_MASTER_ADDR"]
        return Rendezvous(int(environment["PET_NODE_RANK"]), address, environment["PET_MASTER_PORT"])
    return Rendezvous(int(environment["JOB_COMPLETION_INDEX"]), environment["MASTER_ADDR"], environment["MASTER_PORT"])


CLUSTER = Cluster(
    connect=connect,
    environment=dict,  # the image has its own; secrets come by reference
    place=rendezvous_of,
    way_in=way_in,
    collects_output=False,  # each pod's output is kept apart
    records_end=False,
)
