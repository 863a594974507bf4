"""Serve and evaluate stages whose servers cannot start or are killed fail clearly, resume, and leave no process."""

import json
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from fault_table import Fault

from stages.core.errors import ModelError, ResourceError, ServerError, TransientError
from stages.serving.config import ServeExecution, ServingConfig
from stages.serving.engine import LaunchSpec
from stages.serving.server import listening_socket, started_server
from tests.listening import listening_addresses
from tests.serving import (
    SERVING,
    kill,
    make_model,
    run_to_the_end,
    served_processes,
    stage_process,
    wait_for,
    write_tasks,
    write_work,
)

PATIENCE_S = 500.0
ROLES = {"process_tree.py": "supervisor", "VLLM::EngineCore": "engine", "forking_program.py": "server"}

pytestmark = pytest.mark.timeout(1500)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("faults")
    make_model(root / "sft" / "model")
    write_tasks(root / "tasks", num_generations=200)
    return root


@pytest.fixture
def model(root: Path, tmp_path: Path) -> Path:
    """Provide a copy of the model that a test may damage."""
    shutil.copytree(root / "sft" / "model", tmp_path / "model")
    return tmp_path / "model"


def serve_work(root: Path, name: str, **serving: Any) -> Path:
    config = {"model": "sft", "serving": {**SERVING, **serving}, "benchmark": None}
    return write_work(root / name, "serve", config, {"sft": root / "sft"})


def runtime(root: Path) -> Path:
    """Return the folder for temporary files of the servers that serve stages start."""
    return root / "cache" / "servers"


def processes_by_role(folder: Path) -> dict[str, int]:
    """Return the pids of a server's supervisor, API server and engine, by role. folder: for its temporary files."""
    found = {}
    for pid in served_processes(folder):
        try:
            command = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
        except OSError:
            continue
        for sign, role in ROLES.items():
            if sign in command:
                found[role] = pid
                break
    return found


def port_of(stage: int) -> int:
    """Return the port on which the proxy of a serve stage listens."""
    (address,) = listening_addresses([stage])
    return int(address.rpartition(":")[2])


def failure_of(work: Path, process: subprocess.Popen[bytes]) -> tuple[int, str]:
    """Wait for a stage to fail, and return its exit code and error message."""
    exit_code = process.wait(PATIENCE_S)
    return exit_code, json.loads((work / "error.json").read_text())["message"]


def has_died(work: Path) -> bool:
    """Return whether the stage's error says that its server was killed, so that a retry is due."""
    return json.loads((work / "error.json").read_text())["died"]


def assert_nothing_left(folder: Path, port: int | None = None) -> None:
    wait_for(lambda: not served_processes(folder), 120, "the end of all processes")
    if port:
        with socket.socket() as probe:
            assert probe.connect_ex(("127.0.0.1", port)) != 0


def assert_refused(model: Path, error: type[Exception], match: str, **execution: Any) -> None:
    """Check that starting a server for a bad model fails at once, and leaves no process or folder behind."""
    spec = LaunchSpec(model=model, served_name="m", serving=ServingConfig(), engine_version="0.32.0")
    folder = model.parent / "runtime"
    began_s = time.monotonic()
    with (
        pytest.raises(error, match=match),
        started_server(spec, ServeExecution(**execution), model.parent / "log", folder),
    ):
        pytest.fail("the server was started")
    assert time.monotonic() - began_s < 5
    assert not folder.exists()
    assert not served_processes(folder)


def test_a_taken_port_is_told_before_vllm_starts(model: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        assert_refused(model, ResourceError, f"cannot listen on 127.0.0.1:{port}: Address already in use", port=port)


def test_from_the_start_nobody_else_can_listen_on_the_port_of_a_server_and_be_taken_for_it() -> None:
    with listening_socket("127.0.0.1", None) as public, socket.socket() as stranger:
        stranger.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        with pytest.raises(OSError, match="in use"):
            stranger.bind(public.getsockname())
        port = public.getsockname()[1]
        with pytest.raises(ResourceError, match=f"cannot listen on 127.0.0.1:{port}: Address already in use; stop"):
            listening_socket("127.0.0.1", port)
        with socket.create_connection(public.getsockname()):
            public.accept()[0].close()


def test_an_address_of_another_machine_is_told(model: Path) -> None:
    assert_refused(model, ResourceError, "cannot listen on 203.0.113.1", host="203.0.113.1")


def test_a_missing_model_is_named(tmp_path: Path) -> None:
    assert_refused(tmp_path / "nowhere", ModelError, "there is no model folder .*nowhere")


def test_truncated_weights_are_named(model: Path) -> None:
    weights = model / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1000])

    assert_refused(model, ModelError, r"model\.safetensors is damaged or incomplete")


def test_a_broken_config_is_named(model: Path) -> None:
    (model / "config.json").write_text("{")

    assert_refused(model, ModelError, r"config\.json cannot be read as JSON")


@pytest.mark.nightly
def test_a_server_that_refuses_to_start_says_why(root: Path) -> None:
    work = serve_work(root, "too-long", max_model_len=4096)

    with stage_process(work) as process:
        exit_code, message = failure_of(work, process)

    assert exit_code == ServerError.exit_code
    assert "max_model_len (4096) is greater than the derived max_model_len" in message
    assert not has_died(work)
    assert_nothing_left(runtime(root))
    assert not list(runtime(root).iterdir())


@pytest.mark.nightly
def test_heads_that_vllm_starts_with_but_cannot_run_are_named(root: Path) -> None:
    make_model(root / "heads" / "model", head_dim=24)
    config = {"model": "heads", "serving": SERVING, "benchmark": None}
    work = write_work(root / "of-24", "serve", config, {"heads": root / "heads"})

    with stage_process(work) as process:
        exit_code, message = failure_of(work, process)

    assert exit_code == ServerError.exit_code
    assert "Unsupported CPU attention configuration: head_dim=24" in message
    assert_nothing_left(runtime(root))


@pytest.mark.nightly
def test_a_killed_serve_stage_takes_its_server_along(root: Path, fault: Fault) -> None:
    fault.name, fault.stage = "SIGKILL of the stage", "serve"
    with stage_process(serve_work(root, "orphaned")) as process:
        wait_for(lambda: "engine" in processes_by_role(runtime(root)), what="the engine")
        port = port_of(process.pid)
        with fault.timed("detected"):
            process.kill()
            assert_nothing_left(runtime(root), port)


@pytest.mark.parametrize(
    "victim", [*(pytest.param(one, marks=pytest.mark.nightly) for one in ("supervisor", "server")), "engine"]
)
def test_whatever_is_killed_while_a_server_starts_takes_it_along(root: Path, fault: Fault, victim: str) -> None:
    fault.name, fault.stage = f"SIGKILL of vLLM's {victim}", "serve"
    work = serve_work(root, f"without-{victim}")
    with stage_process(work) as process:
        roles = wait_for(lambda: (found := processes_by_role(runtime(root))) and "engine" in found and found)
        with fault.timed("detected"):
            kill([roles[victim]])
            exit_code, message = failure_of(work, process)

    assert exit_code == ServerError.exit_code
    assert "ended before it was ready" in message
    assert has_died(work), "a refresh tries it again"
    assert_nothing_left(runtime(root), None)


@pytest.mark.nightly
@pytest.mark.parametrize("victims", [["engine"], ["server", "engine", "lm-eval"]], ids="+".join)
def test_an_evaluation_goes_on_where_it_was_whoever_is_killed(
    root: Path, new_fault: Callable[..., Fault], victims: list[str]
) -> None:
    """An evaluation resumes after any of its processes was killed, without asking the answered questions again.

    `make test` covers this by `test_a_killed_evaluation_continues_where_it_was` in
    `tests/pipeline/test_serve_evaluate.py`, which kills the evaluation itself.
    """
    shutil.rmtree(root / "evaluate", ignore_errors=True)
    left = range(200, 201)
    for victim in victims:
        fault = new_fault(f"SIGKILL of {'' if victim == 'lm-eval' else 'its '}{victim}", "evaluate")
        answered, requested = disturb_evaluation(evaluation_work(root), victim, fault)
        assert requested in left
        # An attempt tells of every tenth answer, and one request was under way when somebody died.
        left = range(requested - answered - 11, requested - answered + 1)
        fault.lost = f"nothing: {requested - answered} of {requested} requests were left"

    work = evaluation_work(root)
    result = run_to_the_end(work)

    assert answers_and_requests(work)[1] in left
    assert "sums.exact_match" in result.metrics
    assert len((work / "samples" / "sums.jsonl").read_text().splitlines()) == 200
    assert_nothing_left(work)


def evaluation_work(root: Path) -> Path:
    """Reset the evaluate stage's work folder for the next run: delete its reports, but keep its answers."""
    config = {
        "model": "sft",
        "serving": SERVING,
        "tasks": ["sums"],
        "task_folder": str(root / "tasks"),
        "execution": {"concurrent_requests": 1},
    }
    (root / "evaluate" / "events.jsonl").unlink(missing_ok=True)
    return write_work(root / "evaluate", "evaluate", config, {"sft": root / "sft"})


def disturb_evaluation(work: Path, victim: str, fault: Fault) -> tuple[int, int]:
    """Kill a process of an evaluation after 40 answers; return the numbers of answered requests and of all requests."""
    with stage_process(work) as process:
        wait_for(lambda: answers_and_requests(work)[0] >= 40 or process.poll() is not None, what="the 40th answer")
        assert process.poll() is None, (work / "log.txt").read_text()[-3000:]
        with fault.timed("detected"):
            kill([process.pid if victim == "lm-eval" else processes_by_role(work)[victim]])
            exit_code = process.wait(PATIENCE_S)
            assert_nothing_left(work)
    if victim == "lm-eval":
        assert exit_code == -signal.SIGKILL
    else:
        assert exit_code == TransientError.exit_code
        assert "went away while it was asked" in json.loads((work / "error.json").read_text())["message"]
        assert has_died(work)
    answered, requested = answers_and_requests(work)
    assert answered < requested
    return answered, requested


def answers_and_requests(work: Path) -> tuple[int, int]:
    """Return the numbers of answered requests and of all requests that the evaluation has reported so far."""
    events = work / "events.jsonl"
    rows_so_far = [json.loads(line) for line in events.read_text().splitlines()] if events.exists() else []
    last = next((event for event in reversed(rows_so_far) if event["event"] == "progress"), {"done": 0, "total": 0})
    return int(last["done"]), int(last["total"])
