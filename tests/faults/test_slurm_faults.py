"""After faults of Slurm jobs, or of refreshes that wait for them, no job stays in the queue and no work is lost.

Most of these tests are nightly, since Slurm looks at its jobs every half minute only. `make test` runs the others, and
`tests/pipeline/test_slurm.py`.
"""

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import slurm_stage
import tiny

from flows.running.runner import BuiltStage
from flows.store.store import Store
from stages.core.errors import DataError, RecipeError, RefreshStoppedError, StageCrashError, StageTimeoutError
from stages.core.process_tree import descendants, send
from tests.cluster_stages import messages
from tests.searched import commands_with, files_with
from tests.slurm_cluster import SlurmCluster, eventually, running_cluster, why_not

pytestmark = pytest.mark.skipif(why_not() is not None, reason=str(why_not()))
STUCK = {"TINY_STEP_SECONDS": "300"}
SLOW = {"TINY_STEP_SECONDS": "1"}
SLOWEST = {"TINY_STEP_SECONDS": "5"}
"""Environment for ten slow steps: longer than a job waits for its refresh, and Slurm between time limit checks."""
SOON_OVER = {"time_limit": "1", "warning_s": 15}
"""Options of a job that soon reaches its time limit; a minute is Slurm's shortest. The job is warned 15 to 45 s after
its start, since Slurm checks limits every 30 s and warns one check early where the next would be too late."""


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    with running_cluster(tmp_path_factory.mktemp("slurm")) as cluster:
        yield cluster


@pytest.fixture
def store(tmp_path, cluster):
    yield Store(tmp_path / "store")
    assert cluster.jobs() == []


def start_flow(store: Store, mode: str) -> subprocess.Popen:
    command = [sys.executable, slurm_stage.__file__, str(store.root), mode]
    environment = {**os.environ, **SLOWEST}
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def work_of(store: Store, file: str) -> Path:
    found = eventually(lambda: next(store.root.glob(f".work/download/*/{file}"), None), f"no {file}")
    return found.parents[len(Path(file).parts) - 1]


def in_the_background(store: Store, mode: str, environment: dict[str, str], **options) -> tuple[list, threading.Thread]:
    """Run a stage on Slurm in a thread. Return the thread, and a list that receives the stage's outcome or error."""
    outcome: list = []

    def build() -> None:
        try:
            outcome.append(slurm_stage.build(store, mode, environment, **options))
        except Exception as error:
            outcome.append(error)

    thread = threading.Thread(target=build)
    thread.start()
    return outcome, thread


def occupy(cluster: SlurmCluster, partition: str = "normal") -> str:
    """Submit a Slurm job that takes both nodes, so that other jobs must wait; return its id."""
    options = ["--parsable", "--nodes=2", "--exclusive", f"--partition={partition}", "--output=/dev/null"]
    return cluster.command("sbatch", *options, "--wrap=exec sleep 300").strip()


def went_on(built: BuiltStage) -> str:
    """Return the text on lost work in the table of `make faults`: none, with the step at which the stage resumed."""
    return f"nothing: went on at step {built.metrics['first_step']:.0f} of 10"


# ------------------------------------------------------------------------------------- the refresh that waits for it


@pytest.mark.parametrize(
    ("number", "mode"), [(signal.SIGKILL, "family"), pytest.param(signal.SIGTERM, "steps", marks=pytest.mark.nightly)]
)
def test_a_refresh_that_is_killed_takes_its_job_along(cluster, store, fault, number, mode):
    fault.name, fault.stage = f"{number.name} of flow, on Slurm", "download"
    flow = start_flow(store, mode)
    work_of(store, "scratch/*")
    with fault.timed("detected"):
        flow.send_signal(number)
        flow.wait(tiny.PATIENCE_S)
        eventually(lambda: not cluster.jobs(), "the job is left")
        eventually(lambda: not tiny.processes_of(store), "processes are left")


@pytest.mark.nightly
def test_a_stage_that_is_stopped_takes_its_job_along(cluster, store):
    stop = threading.Event()
    threading.Thread(target=lambda: (work_of(store, "scratch"), stop.set())).start()
    planned = slurm_stage.planned_stage(store, "steps", STUCK)
    with pytest.raises(RefreshStoppedError):
        slurm_stage.run_stage(planned, {}, store, tiny.Notes(), stop=stop, launch=slurm_stage.launch)
    assert cluster.jobs() == []
    assert tiny.processes_of(store) == []


@pytest.mark.nightly
def test_a_job_whose_machine_of_the_refresh_was_lost_ends_itself(cluster, store, fault):
    fault.name, fault.stage = "machine of the flow lost, on Slurm", "download"
    flow = start_flow(store, "steps")
    work = work_of(store, "scratch/step")
    with fault.timed("detected"):
        kill_at_once(flow)
        eventually(lambda: not cluster.jobs(), "the job is left")
        eventually(lambda: not tiny.processes_of(store), "processes are left")
    assert "no heartbeat from the agent" in (work / "log.txt").read_text()


@pytest.mark.nightly
def test_the_next_refresh_cancels_a_job_that_a_lost_one_left_waiting(cluster, store, fault):
    fault.name, fault.stage = "machine of the flow lost, job waiting", "download"
    blocker = occupy(cluster)
    flow = start_flow(store, "ok")
    work = work_of(store, "events.jsonl")
    assert "waits: Resources" in messages(work) or "waits: Priority" in messages(work)
    kill_at_once(flow)
    left = [job[2] for job in cluster.jobs() if job[0] != blocker]
    assert len(left) == 1
    cluster.command("scancel", blocker)
    with fault.timed("recovered"):
        assert slurm_stage.build(store, "ok").state == "built"


def kill_at_once(flow: subprocess.Popen) -> None:
    """Kill a refresh's process and all its descendants together, so that none can react to another's death."""
    local = [flow.pid, *descendants(flow.pid)]
    for number in (signal.SIGSTOP, signal.SIGKILL):
        send(number, local)
    flow.wait(tiny.PATIENCE_S)


# ----------------------------------------------------------------------------------------------------- the job itself


@pytest.mark.nightly
def test_a_job_that_reaches_its_time_limit_goes_on_in_another(store, fault):
    fault.name, fault.stage = "Slurm job at its time limit", "download"
    with fault.timed("recovered"):
        built = slurm_stage.build(store, "linger", **SOON_OVER)
    assert built.metrics["first_step"] == 5
    fault.lost = went_on(built)
    assert "was ended by its time limit; submitting it again" in messages(built.artifact)


@pytest.mark.nightly
def test_a_time_limit_that_leads_nowhere_is_an_error(store, fault):
    fault.name, fault.stage = "Slurm time limit without progress", "download"
    with (
        fault.timed("detected"),
        pytest.raises(StageTimeoutError, match=r"got no further than before; raise execution.slurm.time_limit"),
    ):
        slurm_stage.build(store, "steps", STUCK, **SOON_OVER)


@pytest.mark.nightly
def test_a_preempted_job_goes_on_when_the_nodes_are_free_again(cluster, store, fault):
    fault.name, fault.stage = "Slurm job preempted", "download"
    outcome, thread = in_the_background(store, "steps", SLOW)
    work_of(store, "scratch/step")
    with fault.timed("detected"):
        urgent = occupy(cluster, "urgent")
        eventually(lambda: [urgent, "RUNNING"] in [job[:2] for job in cluster.jobs()], "nothing was preempted")
    cluster.command("scancel", urgent)
    with fault.timed("recovered"):
        thread.join()
    assert outcome[0].metrics["first_step"] > 0
    fault.lost = went_on(outcome[0])


@pytest.mark.nightly
def test_a_job_whose_node_is_lost_goes_on_elsewhere(cluster, store, fault):
    fault.name, fault.stage = "SIGKILL of slurmd", "download"
    outcome, thread = in_the_background(store, "steps", SLOW)
    work_of(store, "scratch/step")
    with fault.timed("recovered"):
        cluster.kill_node("node1")
        thread.join()
    cluster.start_node("node1")
    assert outcome[0].metrics["first_step"] > 0
    fault.lost = went_on(outcome[0])
    assert "runs on node2, restart 1" in messages(outcome[0].artifact)
    eventually(cluster.is_idle, "the node did not come back")


@pytest.mark.nightly
def test_a_job_that_somebody_cancels_is_an_error_that_says_so(cluster, store, fault):
    fault.name, fault.stage = "scancel by somebody else", "download"
    outcome, thread = in_the_background(store, "steps", SLOW)
    work_of(store, "scratch/step")
    job = cluster.wait_for_state("RUNNING")
    with fault.timed("detected"):
        cluster.command("scancel", job)
        thread.join()
    assert isinstance(outcome[0], StageCrashError)
    assert "was cancelled by somebody else" in str(outcome[0])
    with fault.timed("recovered"):
        again = slurm_stage.build(store, "steps", SLOW)
    assert again.metrics["first_step"] > 0
    fault.lost = went_on(again)


@pytest.mark.nightly
def test_the_error_of_the_stage_itself_is_what_it_would_be_locally(store):
    with pytest.raises(DataError, match="row 3 has no messages"):
        slurm_stage.build(store, "known_error")


def test_a_partition_that_there_is_not_is_an_error_of_the_recipe(store, fault):
    fault.name, fault.stage = "Slurm refuses the job", "download"
    with fault.timed("detected"), pytest.raises(RecipeError, match=r"Slurm refused the job: .*invalid partition"):
        slurm_stage.build(store, "ok", partition="nowhere")


# ------------------------------------------------------------------------------------------------------------ secrets


def test_slurm_never_sees_the_environment(cluster, store, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "planted-in-the-environment")
    outcome, thread = in_the_background(store, "steps", {"MY_TOKEN": "planted-in-the-recipe", **SLOW})
    work_of(store, "scratch/step")
    job = cluster.wait_for_state("RUNNING")
    seen = cluster.command("scontrol", "show", "job", job) + cluster.command(
        "scontrol", "write", "batch_script", job, "-"
    )
    assert "planted" not in seen
    assert files_with(cluster.folder, "planted") == []
    assert commands_with("planted") == []
    thread.join()
    assert files_with(outcome[0].artifact, "planted") == []
