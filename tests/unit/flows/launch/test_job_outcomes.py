"""Job states that Slurm, Kubernetes and Ray report decide whether a stage waits, fails or is retried."""

import re
import shlex
from http.server import BaseHTTPRequestHandler
from pathlib import Path

import pytest

from flows.launch import node_task
from flows.launch.cluster import order_of
from flows.launch.cluster_job import Failed, Finished, Interrupted, JobEnd, JobFolder, Running, Waiting
from flows.launch.kubernetes_jobs import outcome as kubernetes_outcome
from flows.launch.local import MACHINES_OWN
from flows.launch.network import Rendezvous
from flows.launch.ray import JobView as RayJobView
from flows.launch.ray import RayJobs, submission
from flows.launch.ray import outcome as ray_outcome
from flows.launch.slurm import JobView, parse_job, sbatch_arguments
from flows.launch.slurm import outcome as slurm_outcome
from flows.recipe.recipe import load_stages
from stages.core.errors import RecipeError, ResourceError, StageCrashError, StageTimeoutError, TransientError
from stages.kinds.registry import KINDS
from tests.http_server import serving

PRINTED = (
    "JobId=7 JobName=lifecycle-sft-0 UserId=me(1) Priority=1 JobState={state} Reason={reason} Requeue=1 "
    "Restarts={restarts} ExitCode=0:15 NodeList={nodes} BatchHost=node1 Command=/x/slurm_job.sh"
)


@pytest.fixture
def order(tmp_path):
    return order_for(tmp_path)


def order_for(tmp_path, **more):
    execution = {
        "launcher": "slurm",
        "nodes": 2,
        "threads": 3,
        "slurm": {"partition": "gpu", "time_limit": "1-00:00:00", "gpus_per_node": 4, "options": ["--constraint=h100"]},
        **more,
    }
    tree = {"kind": "train", "method": "sft", "model": "base", "data": {"dataset": "rows"}, "learning_rate": 1e-4}
    tree |= {"global_batch_size": 8, "layout": {"dp_shard": 8}, "execution": execution}
    return order_of("sft", tmp_path / "50%", KINDS["train"].model_validate(tree), ["-m", "stages"], 60.0)


def view(state, reason="None"):
    return JobView(state, reason, "node1", 0, "0:0")


def end(exit_code):
    return JobEnd(job_id="7", exit_code=exit_code)


def test_what_slurm_prints_is_read():
    line = PRINTED.format(state="PENDING", reason="ReqNodeNotAvail,_UnavailableNodes:node2", restarts=2, nodes="(null)")
    assert parse_job(line) == JobView("PENDING", "ReqNodeNotAvail,_UnavailableNodes:node2", "", 2, "0:15")


@pytest.mark.parametrize(
    ("state", "exit_code", "expected"),
    [
        ("COMPLETED", 0, Finished(0)),
        ("FAILED", 5, Finished(5)),
        ("NODE_FAIL", None, Interrupted("the failure of a node")),
        ("PREEMPTED", None, Interrupted("a preemption")),
        ("TIMEOUT", None, Interrupted("its time limit", by_time_limit=True)),
        ("FAILED", None, Interrupted("its time limit", by_time_limit=True)),
    ],
)
def test_slurm_jobs_that_ended(order, state, exit_code, expected):
    assert slurm_outcome(view(state), end(exit_code), order, "7") == expected


@pytest.mark.parametrize(
    ("state", "error", "said"),
    [
        ("CANCELLED", StageCrashError, "cancelled by somebody else"),
        ("OUT_OF_MEMORY", ResourceError, "raise execution.slurm.memory_gib_per_node"),
        ("DEADLINE", StageTimeoutError, "before its deadline"),
        ("FAILED", StageCrashError, "check that the nodes see"),
    ],
)
def test_slurm_jobs_that_slurm_ended(order, state, error, said):
    found = slurm_outcome(view(state), None, order, "7")
    assert isinstance(found, Failed)
    assert isinstance(found.error, error)
    assert said in str(found.error)


@pytest.mark.parametrize(("exit_code", "died"), [("0:9", True), ("0:15", False), ("1:0", False)])
def test_a_batch_step_that_was_killed_is_a_death(order, exit_code, died):
    found = slurm_outcome(JobView("FAILED", "None", "node1", 0, exit_code), None, order, "7")
    assert isinstance(found, Failed)
    assert found.error.died is died


def test_a_job_that_slurm_has_forgotten_is_judged_by_what_it_left(order):
    assert slurm_outcome(None, end(0), order, "7") == Finished(0)
    assert isinstance(slurm_outcome(None, None, order, "7"), Failed)


def test_sbatch_is_asked_for_what_the_recipe_says_and_handed_no_environment(order):
    arguments = sbatch_arguments(order, JobFolder.of(order.work))
    assert {"--nodes=2", "--ntasks-per-node=1", "--cpus-per-task=12", "--gpus-per-node=4", "--export=NONE"} <= set(
        arguments
    )
    assert {"--partition=gpu", "--time=1-00:00:00", "--constraint=h100", "--signal=B:TERM@60"} <= set(arguments)
    assert f"--output={order.work.parent}/50%%/log.txt" in arguments


@pytest.mark.parametrize(
    ("address", "named", "expected"),
    [("10.0.0.1", "ib0", "ib0"), ("10.0.0.1", None, None), ("127.0.0.1", "ib0", "lo"), ("127.0.0.1", None, "lo")],
)
def test_processes_of_several_nodes_speak_on_the_interface_that_is_named(tmp_path, address, named, expected):
    order = order_for(tmp_path, network_interface=named)
    environment = node_task.complete({}, order, Rendezvous(0, address, "29999"))
    assert environment.get("GLOO_SOCKET_IFNAME") == environment.get("NCCL_SOCKET_IFNAME") == expected


def test_an_interface_of_one_node_is_refused():
    execution = {"launcher": "slurm", "network_interface": "ib0"}
    tree = {"base": {"kind": "download", "model": "builtin/qwen3-1m", "execution": execution}}
    with pytest.raises(RecipeError, match=r"execution\.network_interface: found ib0, but processes of one"):
        load_stages("one", Path("/"), tree)


@pytest.mark.parametrize("option", ["--wrap=rm", "--export=ALL", "-p gpu", "--output=/tmp/x", "--x y"])
def test_options_of_sbatch_that_are_not_the_recipes_are_refused(option):
    execution = {"launcher": "slurm", "slurm": {"options": [option]}}
    with pytest.raises(ValueError, match=r"is no option of sbatch|is set by the launcher"):
        KINDS["download"].model_validate({"kind": "download", "model": "builtin/qwen3-1m", "execution": execution})


@pytest.mark.parametrize(
    "name", ["SLURM_JOB_ID", "CUDA_VISIBLE_DEVICES", "MASTER_ADDR", "RANK", "TMPDIR", "RAY_AUTH_TOKEN"]
)
def test_what_describes_this_machine_is_not_handed_over(name):
    assert MACHINES_OWN.fullmatch(name)


@pytest.mark.parametrize("name", ["HF_TOKEN", "SSL_CERT_FILE", "PATH", "HOME", "NCCL_DEBUG", "RANKING"])
def test_what_describes_the_user_is(name):
    assert not MACHINES_OWN.fullmatch(name)


# --------------------------------------------------------------------------------------------------------- Kubernetes

FAILED = {"status": {"conditions": [{"type": "Failed", "status": "True", "reason": "BackoffLimitExceeded"}]}}


def pod(*conditions, **state):
    return {
        "metadata": {"name": "sft-0"},
        "status": {"conditions": conditions, "containerStatuses": [{"state": state}]},
    }


@pytest.mark.parametrize(
    ("job", "pods", "expected"),
    [
        ({"status": {"conditions": [{"type": "Complete", "status": "True"}]}}, [], Finished(0)),
        (FAILED, [pod(terminated={"exitCode": 143}), pod(terminated={"exitCode": 5})], Finished(5)),
        ({}, [pod(running={})], Running()),
        ({}, [pod(waiting={"reason": "ContainerCreating"})], Running()),
        ({}, [pod(waiting={"reason": "ImagePullBackOff", "message": "no x"})], Waiting("ImagePullBackOff: no x")),
        ({}, [pod({"type": "PodScheduled", "status": "False", "message": "0/4 nodes"})], Waiting("0/4 nodes")),
        ({}, [], Waiting("it has no pods yet")),
        (
            {"status": {"conditions": [{"type": "Suspended", "status": "True", "message": "Job suspended"}]}},
            [pod(terminated={"exitCode": 143})],  # of its time before a preemption
            Waiting("suspended: Job suspended"),
        ),
        ({"status": {"conditions": [{"type": "Suspended", "status": "False"}]}}, [pod(running={})], Running()),
        (
            FAILED,
            [pod({"type": "DisruptionTarget", "status": "True", "reason": "Preempted"}, terminated={"exitCode": 143})],
            Interrupted("the loss of a pod (Preempted)"),
        ),
    ],
)
def test_kubernetes_jobs(order, job, pods, expected):
    assert kubernetes_outcome(job, pods, order) == expected


@pytest.mark.parametrize(
    ("state", "error"),
    [({"terminated": {"exitCode": 137, "reason": "OOMKilled"}}, ResourceError), ({"waiting": {}}, StageCrashError)],
)
def test_kubernetes_jobs_that_kubernetes_ended(order, state, error):
    found = kubernetes_outcome(FAILED, [pod(**state)], order)
    assert isinstance(found, Failed)
    assert isinstance(found.error, error)


# ---------------------------------------------------------------------------------------------------------------- Ray


@pytest.mark.parametrize(
    ("view", "expected"),
    [
        ({"status": "PENDING", "message": "It may be waiting for CPUs"}, Waiting("It may be waiting for CPUs")),
        ({"status": "RUNNING"}, Running()),
        ({"status": "SUCCEEDED", "driver_exit_code": 0}, Finished(0)),
        ({"status": "FAILED", "driver_exit_code": 5, "error_type": "JOB_ENTRYPOINT_COMMAND_ERROR"}, Finished(5)),
        ({"status": "FAILED", "driver_exit_code": -9}, Finished(137)),
        (
            {"status": "FAILED", "error_type": "JOB_SUPERVISOR_ACTOR_DIED"},
            Interrupted("the loss of its node, or of Ray's process there"),
        ),
        (None, Interrupted("a restart of the Ray cluster, which knows nothing of it any more")),
    ],
)
def test_ray_jobs(order, view, expected):
    assert ray_outcome(view and RayJobView(**view), "Ray job 7", order) == expected


@pytest.mark.parametrize(
    ("view", "said"),
    [
        ({"status": "STOPPED"}, "Ray job 7 of sft was stopped by somebody else"),
        (
            {"status": "FAILED", "error_type": "RUNTIME_ENV_SETUP_FAILURE", "message": "no\nx"},
            r"ran: RUNTIME_ENV_SETUP_FAILURE: 'no\\nx'",
        ),
    ],
)
def test_ray_jobs_that_ray_ended(order, view, said):
    found = ray_outcome(RayJobView(**view), "Ray job 7", order)
    assert isinstance(found, Failed) and isinstance(found.error, StageCrashError)
    assert re.search(said, str(found.error))


def test_ray_is_asked_for_what_the_recipe_says_and_handed_no_environment(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "of the user")
    ray = {"gpus_per_node": 8, "memory_gib_per_node": 2, "resources": {"fast_disk": 1}}
    order = order_for(tmp_path, launcher="ray", nodes=1, ray=ray)
    request = submission("job-1", order, JobFolder.of(order.work))
    assert (request["entrypoint_num_cpus"], request["entrypoint_num_gpus"]) == (24, 8)
    assert (request["entrypoint_memory"], request["entrypoint_resources"]) == (2**31, {"fast_disk": 1.0})
    assert shlex.split(request["entrypoint"])[-2:] == [str(JobFolder.of(order.work).path), "job-1"]
    assert "of the user" not in str(request)


def test_a_job_of_ray_has_one_node():
    tree = {"kind": "train", "method": "sft", "model": "base", "data": {"dataset": "rows"}, "learning_rate": 1e-4}
    tree |= {"global_batch_size": 8, "layout": {"dp_shard": 2}, "execution": {"launcher": "ray", "nodes": 2}}
    sources = {"base": {"kind": "download", "model": "builtin/qwen3-1m"}}
    sources["rows"] = {"kind": "download", "dataset": "builtin/addition"}
    with pytest.raises(RecipeError, match=r"execution\.nodes: found 2, but the ray launcher has one node only"):
        load_stages("one", Path("/"), {**sources, "sft": tree})


@pytest.mark.parametrize(
    ("status", "body", "error", "said"),
    [
        (401, "", ResourceError, "put the cluster's key into RAY_AUTH_TOKEN"),
        (
            400,
            "Traceback …\n  File x\nValueError: no such resource",
            RecipeError,
            "job: 'ValueError: no such resource'; see",
        ),
        (500, "x", TransientError, "answered 500"),
        (302, "", TransientError, "a redirect to .*which is not followed"),
    ],
)
def test_what_ray_refuses_is_an_error_with_its_words(order, monkeypatch, status, body, error, said):
    got = []

    class Head(BaseHTTPRequestHandler):
        def do_POST(self):
            got.append(self.headers["Authorization"])
            self.rfile.read(int(self.headers["Content-Length"]))
            self.send_response(status)
            self.send_header("Location", "http://127.0.0.1:1/elsewhere")
            self.send_header("Content-Length", str(len(body.encode())))
            self.end_headers()
            self.wfile.write(body.encode())

        def log_message(self, *_):
            pass

    order.work.mkdir()
    (folder := JobFolder.of(order.work)).path.mkdir()
    with serving(Head) as url:
        monkeypatch.setenv("RAY_API_SERVER_ADDRESS", f"{url}/")
        monkeypatch.setenv("RAY_AUTH_TOKEN", "k" * 40)
        with pytest.raises(error, match=said):
            RayJobs(folder, order).submit()
    assert got == ["Bearer " + "k" * 40]
    with pytest.raises(TransientError, match="does not answer, asked to submit the job"):
        RayJobs(folder, order).submit()
    monkeypatch.setenv("RAY_API_SERVER_ADDRESS", "ray://head:10001")
    with pytest.raises(ResourceError, match=r"set RAY_API_SERVER_ADDRESS to the address of the head's dashboard"):
        RayJobs(folder, order)
