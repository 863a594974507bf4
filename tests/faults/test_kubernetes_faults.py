"""Stages in Kubernetes Jobs, of a stand-in for its API, survive evicted pods; deleted or refused Jobs are reported."""

import json
import re
import subprocess
import sys
import threading

import pytest
import tiny
from slurm_stage import launch

from flows.launch.cluster import order_of
from flows.launch.cluster_job import JobFolder
from flows.launch.failures import INTERRUPTED
from flows.launch.through_bucket import JobMirror
from flows.ledger.home import home
from flows.running.runner import BuiltStage, run_stage
from flows.running.workspace import ResolvedInputs, prepare
from flows.store.collect import verify
from flows.store.shared import obtain
from flows.store.store import Store
from stages.core.errors import DataError, RecipeError, ResourceError, StageCrashError, TransientError
from tests.cluster_stages import messages
from tests.kubernetes_api import Cluster, running_api
from tests.s3_server import BUCKET, running_s3

SLOW = {"TINY_STEP_SECONDS": "0.5"}
TRAINING = {
    "kind": "train",
    "method": "sft",
    "model": "base",
    "data": {"dataset": "rows"},
    "global_batch_size": 2,
    "learning_rate": 1e-3,
}


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


EVICTED = {"DisruptionTarget": "the loss of a pod (PreemptionByScheduler)", "Ready": "a request to end"}
"""Conditions of pods that a cluster evicts, with what a stage says of it; not all clusters name the cause."""


def test_pods_that_are_evicted_are_replaced_and_the_stage_goes_on(cluster: Cluster, store, new_fault, monkeypatch):
    monkeypatch.setitem(SLOW, "TINY_STEP_SECONDS", "0.1")
    outcome, thread = in_the_background(store, "linger_twice")
    for step, condition in zip(("5", "7"), EVICTED, strict=True):
        fault = new_fault(f"pod evicted, {condition}", "download")
        fault.lost = f"nothing: went on at step {step} of 10"
        tiny.eventually(
            lambda step=step: any(file.read_text() == step for file in store.root.glob(".work/*/*/scratch/step")),
            f"not at step {step}",
        )
        (pod,) = cluster.processes
        cluster.conditions[pod] = [{"type": condition, "status": "True", "reason": "PreemptionByScheduler"}]
        evicted = cluster.processes[pod]
        with fault.timed("detected"):
            evicted.terminate()
            tiny.eventually(
                lambda pod=pod, evicted=evicted: cluster.processes.get(pod) not in (None, evicted), "no new pod"
            )
        cluster.conditions.clear()
    with fault.timed("recovered"):
        thread.join()
    assert outcome[0].metrics["first_step"] == 7
    said = messages(outcome[0].artifact)
    assert re.findall(r"was ended by (.*); submitting it again", said) == [
        EVICTED["DisruptionTarget"],
        f"{EVICTED['Ready']}, or for want of heartbeats",
    ]


AWS = ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_REGION", "AWS_ENDPOINT_URL")


@pytest.fixture
def bucket(tmp_path, cluster, monkeypatch):
    """Give the home a shared store, and pods an empty disk in place of the home's."""
    with running_s3(monkeypatch) as server:
        home = tmp_path / "home"
        home.mkdir()
        (home / "store.yaml").write_text(f"store: s3://{BUCKET}/team\n")
        monkeypatch.setenv("LIFECYCLE_HOME", str(home))
        cluster.own_disk = home
        yield server
        assert not [key for key in server.objects() if "/jobs/" in key]


def build_away(mode: str, notes: tiny.Notes | None = None, secrets: tuple[str, ...] = AWS) -> BuiltStage:
    """Build the stand-in's dataset, then a stage upon it whose job does not see this home's disk."""
    store = Store(home() / "store")
    secrets = {name: f"bucket/{name}" for name in secrets}
    away = {"image": "pipeline:1", "namespace": "ml", "store_claim": None, "secrets": secrets}
    execution = {"launcher": "kubernetes", "environment": {**SLOW, "TINY": mode}, "kubernetes": away, "threads": 1}
    tree = {"base": tiny.model_stage(), "rows": tiny.stage("ok"), "sft": {**TRAINING, "execution": execution}}
    planned, built = tiny.planned_stages(store, tree), {}
    for name in ("base", "rows"):
        built[name] = run_stage(planned[name], built, store, tiny.Notes(), launch=tiny.launch)
    return run_stage(planned["sft"], built, store, notes or tiny.Notes(), launch=launch)


def test_a_job_without_the_homes_disk_gets_its_files_from_the_bucket_and_leaves_them_there(bucket):
    notes = tiny.Notes()
    built = build_away("inputs", notes)
    seen = json.loads((built.artifact / "data" / "seen").read_text())
    assert seen.pop("home") == ["store", "store.yaml"], "and nothing of what this machine has there"
    assert seen == {"base": ["content", "train.jsonl"], "rows": ["content", "train.jsonl"]}
    assert set(built.record.files) >= {"data/content", "metrics.jsonl", "events.jsonl", "result.json"}
    assert "on another disk" in messages(built.artifact)
    assert "on another disk" in (built.artifact / "log.txt").read_text()
    assert all(one.whole for one in verify(Store(home() / "store")))
    other = Store(home().parent / "other" / "store")
    other.root.parent.mkdir()
    (other.root.parent / "store.yaml").write_bytes((home() / "store.yaml").read_bytes())
    assert obtain(other, built.kind, built.version).record == built.record


@pytest.mark.nightly
def test_the_error_of_a_job_without_the_homes_disk_arrives_and_so_does_its_log(bucket):
    with pytest.raises(DataError, match="row 3 has no messages"):
        build_away("known_error")


@pytest.mark.nightly
def test_a_pod_that_cannot_read_the_bucket_is_an_error_that_names_the_bucket_and_the_secrets(bucket):
    with pytest.raises(TransientError, match=r"exited with 75.*s3://lake/team.*kubernetes\.secrets names"):
        build_away("ok", secrets=("AWS_REGION", "AWS_ENDPOINT_URL"))


@pytest.mark.nightly
def test_a_pod_without_the_homes_disk_that_is_evicted_goes_on_from_the_checkpoint_in_the_bucket(cluster, bucket, fault):
    fault.name, fault.stage = "pod evicted, home on another disk", "train"
    outcome: list = []
    thread = threading.Thread(target=lambda: outcome.append(build_away("linger")))
    thread.start()
    tiny.eventually(lambda: [key for key in bucket.objects() if key.endswith("/scratch.json")], "no checkpoint sent")
    (pod,) = cluster.processes
    cluster.conditions[pod] = [{"type": "DisruptionTarget", "status": "True", "reason": "PreemptionByScheduler"}]
    evicted = cluster.processes[pod]
    with fault.timed("detected"):
        evicted.kill()
        tiny.eventually(lambda: cluster.processes.get(pod) not in (None, evicted), "no new pod")
    cluster.conditions.clear()
    with fault.timed("recovered"):
        thread.join()
    assert outcome[0].metrics["first_step"] > 0
    fault.lost = f"nothing: went on at step {outcome[0].metrics['first_step']:.0f} of 10"
    steps = [json.loads(line)["step"] for line in (outcome[0].artifact / "metrics.jsonl").read_text().splitlines()]
    assert sorted(set(steps)) == list(range(10))


@pytest.mark.nightly
def test_a_job_on_another_disk_whose_home_is_dead_ends_itself_and_leaves_its_checkpoint(bucket, tmp_path):
    store = Store(home() / "store")
    away = {"image": "pipeline:1", "store_claim": None}
    execution = {"launcher": "kubernetes", "environment": SLOW, "kubernetes": away}
    planned = tiny.planned_stages(store, {"rows": tiny.stage("pause", **execution)})["rows"]
    work = store.make_folder(store.work_folder(planned.kind, planned.name, planned.resume_key))
    prepare(store, planned, ResolvedInputs({}, {}, {}))
    order = order_of("rows", work, planned.config, [str(tiny.SCRIPT), str(work)], 8.0)
    JobFolder.of(work).write(order, planned.config.execution.environment)
    mirror = JobMirror(order)
    mirror.send()
    command = [sys.executable, "-m", "flows.launch.away_task", order.through, order.job]
    hidden = ["unshare", "--map-root-user", "--mount", "sh", "-c", f'mount -t tmpfs tmpfs {home()} && exec "$@"', "sh"]
    ended = subprocess.run([*hidden, *command], text=True, capture_output=True, timeout=200)
    assert ended.returncode == INTERRUPTED, ended.stderr
    mirror.fetch()
    assert (work / "scratch" / "step").read_text() == "5"
    assert "no heartbeat from the agent for 8 s" in ended.stdout
    assert JobFolder.of(work).end(order.job) is None, "interrupted, not ended"
    mirror.close()


def test_a_job_without_the_homes_disk_takes_no_secrets_through_the_bucket_and_needs_one(bucket, monkeypatch):
    monkeypatch.setitem(SLOW, "HF_TOKEN", "hf_secret-of-the-test")
    with pytest.raises(RecipeError, match=r"execution.environment holds a secret.*kubernetes.secrets"):
        build_away("ok")
    assert b"hf_secret" not in b"".join(bucket.objects().values())
    monkeypatch.delitem(SLOW, "HF_TOKEN")
    (home() / "store.yaml").unlink()
    with pytest.raises(RecipeError, match=r"store_claim: null.*store\.yaml"):
        build_away("ok")


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
