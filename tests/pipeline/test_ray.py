"""Stages run as jobs of a real Ray cluster on this machine: they fail, are stopped, and go on when a node is lost."""

import os
import shutil
import signal
import socket
import subprocess
import tempfile
import threading
from contextlib import contextmanager
from pathlib import Path

import httpx
import psutil
import pytest

from flows.running.runner import BuiltStage, run_stage
from flows.store.store import Store
from stages.core.errors import DataError, ResourceError, StageCrashError
from stages.core.process_tree import marked_processes
from stages.core.supervised import SupervisedProcess
from tests.cluster_stages import messages  # whose folder of tiny stages is that of the two below

import tiny  # isort: skip
from slurm_stage import launch  # isort: skip

pytestmark = pytest.mark.nightly

RAY = Path(__file__).parents[2] / ".venv-ray" / "bin" / "ray"
KEY = "a" * 64
NUM_TRIES = 4
SLOW = {"TINY_STEP_SECONDS": "0.5"}
HEADERS = {"Authorization": f"Bearer {KEY}"}


class RayCluster:
    """Ray's head, which has no CPU, and nodes of one CPU each, as processes of this machine that can be killed."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.ports = [free_port() for _ in range(2)]
        self.url = f"http://127.0.0.1:{self.ports[1]}"
        # Minutes may pass until a busy machine answers.
        self.client = httpx.Client(base_url=self.url, headers=HEADERS, timeout=120)
        self.nodes: list[SupervisedProcess] = []
        dashboard = ["--dashboard-host=127.0.0.1", f"--dashboard-port={self.ports[1]}", f"--temp-dir={folder}"]
        self.head = self._start("--head", f"--port={self.ports[0]}", "--num-cpus=0", *dashboard)
        tiny.eventually(self.answers, "Ray's head does not answer")

    def _start(self, *options: str) -> SupervisedProcess:
        command = [RAY, "start", "--block", "--node-ip-address=127.0.0.1", "--disable-usage-stats", *options]
        known = {**os.environ, "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": KEY}
        # Ray gives up after 30 s, which are few on a busy machine.
        for _ in range(NUM_TRIES):
            with (log := self.folder / "log").open("wb") as output:
                process = SupervisedProcess(
                    [*map(str, command), "--object-store-memory=80000000"], environment=known, output=output
                )
            tiny.eventually(lambda: "block forever" in log.read_text() or not process.alive(), "Ray does not start")  # noqa: B023
            if process.alive():
                return process
        raise AssertionError(log.read_text())

    def add_node(self, resources: str = "{}") -> None:
        address = f"--address=127.0.0.1:{self.ports[0]}"
        num_before = self.num_alive()
        self.nodes.append(self._start(address, "--num-cpus=1", f"--resources={resources}"))
        tiny.eventually(lambda: self.num_alive() > num_before, "the node does not join")

    def answers(self) -> bool:
        assert self.head.alive(), (self.folder / "log").read_text()
        try:
            return self.client.get("/api/jobs/").is_success
        except httpx.TransportError:
            return False  # it starts

    def num_alive(self) -> int:
        """Return the number of nodes that Ray counts as alive, with the head."""
        tiny.eventually(self.answers, "Ray's head does not answer")
        shown = self.client.get("/nodes?view=summary").raise_for_status().json()
        return sum(node["raylet"].get("state") == "ALIVE" for node in shown["data"]["summary"])

    def jobs(self) -> dict[str, str]:
        """Return the status of each job that was submitted, by its name."""
        listed = self.client.get("/api/jobs/").raise_for_status().json()
        return {job["submission_id"]: job["status"] for job in listed if job["submission_id"]}

    def kill_node_of_stage(self) -> None:
        """Kill the node that runs the stand-in of a stage, as a loss of power does, and wait until Ray knows."""
        num_before = self.num_alive()
        (node,) = (node for node in self.nodes if any(map(is_stage, marked_processes(node.token))))
        for pid in marked_processes(node.token):
            os.kill(pid, signal.SIGKILL)
        self.nodes.remove(node)
        node.stop()
        tiny.eventually(lambda: self.num_alive() < num_before, "Ray does not notice the loss of a node")

    def stop(self) -> None:
        self.client.close()
        for process in (*self.nodes, self.head):
            process.stop()


def is_stage(pid: int) -> bool:
    try:
        return str(tiny.SCRIPT) in psutil.Process(pid).cmdline()
    except psutil.NoSuchProcess:
        return False


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


@pytest.fixture(scope="module")
def shared():
    # Ray's sockets have long names below it.
    folder = Path(tempfile.mkdtemp(prefix="ray-", dir="/tmp"))
    cluster = RayCluster(folder)
    try:
        for _ in range(2):
            cluster.add_node()
        yield cluster
    finally:
        cluster.stop()
        shutil.rmtree(folder)


@pytest.fixture
def cluster(shared, monkeypatch):
    monkeypatch.setenv("RAY_API_SERVER_ADDRESS", shared.url)
    monkeypatch.setenv("RAY_AUTH_TOKEN", KEY)
    yield shared
    assert not {*shared.jobs().values()} & {"PENDING", "RUNNING"}


@pytest.fixture
def store(tmp_path, cluster, monkeypatch):
    monkeypatch.setenv("LIFECYCLE_HOME", str(tmp_path))
    return Store(tmp_path / "store")


def build(store: Store, mode: str, stop: threading.Event | None = None, **options: object) -> BuiltStage:
    execution = {"launcher": "ray", "environment": SLOW, "ray": options}
    planned = tiny.planned_stages(store, {"rows": tiny.stage(mode, **execution)})["rows"]
    return run_stage(planned, {}, store, tiny.Notes(), stop=stop, launch=launch)


@contextmanager
def in_the_background(store: Store, mode: str, stop: threading.Event | None = None, **options: object):
    """Build a stage in a thread; yield a list that has its outcome or error after the block."""
    outcome: list = []

    def run() -> None:
        try:
            outcome.append(build(store, mode, stop, **options))
        except Exception as error:
            outcome.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield outcome
    finally:
        thread.join()


def wait_for_step(store: Store) -> None:
    tiny.eventually(lambda: next(store.root.glob(".work/*/*/scratch/ready"), None), "no step")


def said(store: Store) -> str:
    return "\n".join(messages(file.parent) for file in store.root.glob(".work/*/*/events.jsonl"))


def test_a_stage_runs_on_a_node_and_leaves_what_it_leaves_locally(store, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "of the user")
    built = build(store, "ok")
    assert built.metrics["rows"] == 1.0
    assert (built.artifact / "data" / "content").read_text() == "content"


def test_the_error_of_the_stage_itself_is_what_it_would_be_locally(store):
    with pytest.raises(DataError, match="row 3 has no messages"):
        build(store, "known_error")


def test_a_stage_that_is_stopped_takes_its_job_and_its_processes_along(cluster, store):
    stop = threading.Event()
    with in_the_background(store, "pause", stop) as outcome:
        wait_for_step(store)
        stop.set()
    assert isinstance(outcome[0], tiny.RefreshStoppedError)
    assert not [pid for node in cluster.nodes for pid in marked_processes(node.token) if is_stage(pid)]


def test_a_job_that_somebody_stops_is_an_error_that_says_so(cluster, store):
    with in_the_background(store, "pause") as outcome:
        wait_for_step(store)
        (job,) = (name for name, status in cluster.jobs().items() if status == "RUNNING")
        cluster.client.post(f"/api/jobs/{job}/stop").raise_for_status()
    assert isinstance(outcome[0], StageCrashError)
    assert "was stopped by somebody else; run again to continue" in str(outcome[0])


def test_a_stage_whose_node_is_killed_goes_on_from_its_checkpoint_on_another(cluster, store):
    with in_the_background(store, "linger") as outcome:
        wait_for_step(store)
        cluster.kill_node_of_stage()
    cluster.add_node()
    assert outcome[0].metrics["first_step"] == 5
    assert "was ended by the loss of its node, or of Ray's process there" in messages(outcome[0].artifact)


def test_a_job_that_waits_says_why_and_starts_nothing_once_it_is_cancelled(cluster, store):
    stop = threading.Event()
    with in_the_background(store, "ok", stop, resources={"late": 1}) as outcome:
        tiny.eventually(lambda: "may be waiting for resources" in said(store), "no reason to wait")
        stop.set()
    assert isinstance(outcome[0], tiny.RefreshStoppedError)
    (job,) = (name for name, status in cluster.jobs().items() if status == "PENDING")  # Ray takes none back
    cluster.add_node('{"late": 1}')
    tiny.eventually(lambda: cluster.jobs()[job] not in ("PENDING", "RUNNING"), "the job does not end")
    assert not list(store.root.glob(".work/*/*/data"))


def test_a_cluster_with_another_key_is_an_error_that_says_where_to_put_it(store, monkeypatch):
    monkeypatch.setenv("RAY_AUTH_TOKEN", "b" * 64)
    with pytest.raises(ResourceError, match=r"does not let us .*: 40[13]; put the cluster's key into RAY_AUTH_TOKEN"):
        build(store, "ok")
    monkeypatch.delenv("RAY_API_SERVER_ADDRESS")
    with pytest.raises(ResourceError, match=r"set RAY_API_SERVER_ADDRESS to the address of the head's dashboard"):
        build(store, "ok")


def test_rays_records_hold_no_variable_of_the_user(cluster, store, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "hf_of-the-user")
    with in_the_background(store, "linger") as outcome:
        wait_for_step(store)
        listed = cluster.client.get("/api/jobs/").text
        (work,) = store.root.glob(".work/*/*")
        (work / "scratch" / "release").touch()
    assert outcome[0].metrics["rows" if "rows" in outcome[0].metrics else "first_step"] is not None
    assert "node_task" in listed and "hf_of-the-user" not in listed
    assert subprocess.run(["grep", "-rq", "hf_of-the-user", cluster.folder], check=False).returncode == 1
