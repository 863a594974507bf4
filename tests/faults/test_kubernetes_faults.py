"""Stages in Kubernetes Jobs, of a stand-in for its API, survive evicted pods; deleted or refused Jobs are reported."""

import threading

import pytest
import tiny
from slurm_stage import launch

from flows.running.runner import BuiltStage, run_stage
from flows.store.store import Store
from stages.core.errors import DataError, RecipeError, ResourceError, StageCrashError
from tests.cluster_stages import messages
from tests.kubernetes_api import Cluster, running_api

SLOW = {"TINY_STEP_SECONDS": "0.5"}


@pytest.fixture
def cluster(tmp_path):
    with running_api(tmp_path) as cluster:
        yield cluster


@pytest.fixture
def store(tmp_path, cluster, monkeypatch):
    monkeypatch.setenv("LIFECYCLE_HOME", str(tmp_path))
    yield Store(tmp_path / "store")
    assert cluster.objects == {}
    assert cluster.processes == {}


def build(store: Store, mode: str, stop: threading.Event | None = None) -> BuiltStage:
    execution = {
        "launcher": "kubernetes",
        "environment": SLOW,
        "kubernetes": {"image": "pipeline:1", "namespace": "ml"},
    }
    planned = tiny.planned_stages(store, {"rows": tiny.stage(mode, **execution)})["rows"]
    return run_stage(planned, {}, store, tiny.Notes(), stop=stop, launch=launch)


def in_the_background(store: Store, mode: str) -> tuple[list, threading.Thread]:
    outcome: list = []

    def run() -> None:
        try:
            outcome.append(build(store, mode))
        except Exception as error:
            outcome.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    return outcome, thread


def wait_for_step(store: Store) -> None:
    tiny.eventually(lambda: next(store.root.glob(".work/*/*/scratch/step"), None), "no step")


def test_a_stage_runs_in_a_pod_and_leaves_what_it_leaves_locally(store):
    built = build(store, "ok")
    assert built.metrics["rows"] == 1.0
    assert (built.artifact / "data" / "content").read_text() == "content"


def test_the_error_of_the_stage_itself_is_what_it_would_be_locally(store):
    with pytest.raises(DataError, match="row 3 has no messages"):
        build(store, "known_error")


def test_a_stage_that_is_stopped_takes_its_job_along(store):
    stop = threading.Event()
    threading.Thread(target=lambda: (wait_for_step(store), stop.set())).start()
    with pytest.raises(tiny.RefreshStoppedError):
        build(store, "pause", stop=stop)


def test_a_job_that_somebody_deletes_is_an_error_that_says_so(cluster, store, fault):
    fault.name, fault.stage = "Kubernetes job deleted", "download"
    outcome, thread = in_the_background(store, "pause")
    wait_for_step(store)
    (name,) = cluster.jobs()
    with fault.timed("detected"):
        cluster.delete("/apis/batch/v1/namespaces/ml/jobs", name)
        thread.join()
    assert isinstance(outcome[0], StageCrashError)
    assert "was deleted by somebody else" in str(outcome[0])


def test_a_pod_that_is_evicted_is_replaced_and_the_stage_goes_on(cluster: Cluster, store, fault):
    fault.name, fault.stage = "pod evicted", "download"
    outcome, thread = in_the_background(store, "linger")
    wait_for_step(store)
    (pod,) = cluster.processes
    cluster.conditions[pod] = [{"type": "DisruptionTarget", "status": "True", "reason": "PreemptionByScheduler"}]
    evicted = cluster.processes[pod]
    with fault.timed("detected"):
        evicted.terminate()
        tiny.eventually(lambda: cluster.processes.get(pod) not in (None, evicted), "no new pod")
    cluster.conditions.clear()
    with fault.timed("recovered"):
        thread.join()
    assert outcome[0].metrics["first_step"] > 0
    fault.lost = f"nothing: went on at step {outcome[0].metrics['first_step']:.0f} of 10"
    assert "was ended by the loss of a pod (PreemptionByScheduler); submitting it again" in messages(
        outcome[0].artifact
    )


def test_why_a_pod_waits_is_told(cluster, store):
    cluster.schedulable = False
    stop = threading.Event()

    def reason_is_told() -> bool:
        return any(
            "waits: 0/4 nodes are available: insufficient memory" in messages(file.parent)
            for file in store.root.glob(".work/*/*/events.jsonl")
        )

    def stop_when_told() -> None:
        try:
            tiny.eventually(reason_is_told, "no message says why the pod waits")
            outcome.append("told")
        finally:
            stop.set()

    outcome: list[str] = []
    threading.Thread(target=stop_when_told).start()
    with pytest.raises(tiny.RefreshStoppedError):
        build(store, "ok", stop=stop)
    assert outcome == ["told"]


def test_a_job_waits_in_its_queue_with_kueues_reason_until_it_is_admitted(cluster: Cluster, store):
    cluster.queued = "couldn't assign flavors to pod set main: insufficient unused quota for nvidia.com/gpu"
    outcome, thread = in_the_background(store, "ok")
    said = f"waits: in the queue research: {cluster.queued}"
    tiny.eventually(
        lambda: any(said in messages(file.parent) for file in store.root.glob(".work/*/*/events.jsonl")), "no reason"
    )
    cluster.admit()
    thread.join()
    assert outcome[0].metrics["rows"] == 1.0


@pytest.mark.parametrize(
    ("status", "said", "error", "remedy"),
    [
        (403, "jobs.batch is forbidden", ResourceError, "see deploy/kubernetes/rbac.yaml"),
        (422, "spec.template.spec.containers[0].image: Required value", RecipeError, "see execution.kubernetes"),
    ],
)
def test_what_kubernetes_refuses_is_told_with_its_words(cluster, store, fault, status, said, error, remedy):
    fault.name, fault.stage = f"Kubernetes answers {status}", "download"
    cluster.refusals["Job"] = (status, said)
    with fault.timed("detected"), pytest.raises(error) as refused:
        build(store, "ok")
    assert said in str(refused.value)
    assert remedy in str(refused.value)
