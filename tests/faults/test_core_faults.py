"""When any process of a stage dies, its other processes end, no incomplete artifact is stored, and work resumes.

Real processes throughout; only what the stage computes is small.
"""

import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import tiny

from flows.running.runner import run_stage
from flows.store.store import Store
from stages.core.errors import RefreshStoppedError, StageCrashError
from stages.core.process_tree import living_processes


@pytest.fixture
def store(tmp_path):
    return Store(tmp_path / "store")


def work_of(store: Store) -> Path:
    return tiny.eventually(lambda: next(store.root.glob(".work/download/*"), None), "no work folder")


def start_refresh(store: Store, mode: str) -> subprocess.Popen:
    # The store's path in the environment marks the stage's descendants for this test, whatever the token does.
    return subprocess.Popen(
        [sys.executable, tiny.__file__, str(store.root), mode],
        env={**os.environ, "MARK_OF_TEST": str(store.root)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def supervisor_of(flow: subprocess.Popen) -> int:
    """Return the child of a flow that leads a session of its own, as no other does."""
    return tiny.eventually(
        lambda: next((pid for pid, family in living_processes().items() if family == (flow.pid, pid)), None),
        "the flow started no supervisor",
    )


# ------------------------------------------------------------------------------------------- nothing is left running


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_no_process_outlives_a_flow_that_is_killed(store, fault, number):
    fault.name, fault.stage = f"{number.name} of flow, deaf grandchildren", "download"
    flow = start_refresh(store, "family")
    tiny.eventually((work_of(store) / "scratch" / "ready").exists, "the stage did not start")
    # While the kernel starts a process's program, its environment cannot be read.
    tiny.eventually(lambda: len(tiny.processes_of(store)) >= 6, "flow, supervisor, stage, two children and an orphan")
    with fault.timed("detected"):
        flow.send_signal(number)
        flow.wait(tiny.PATIENCE_S)
        tiny.eventually(lambda: not tiny.processes_of(store), f"{tiny.processes_of(store)} are left")
    assert store.index().artifacts == ()


def test_no_process_outlives_a_supervisor_that_is_killed(store, fault):
    fault.name, fault.stage = "SIGKILL of supervisor, deaf grandchildren", "download"
    flow = start_refresh(store, "family")
    tiny.eventually((work_of(store) / "scratch" / "ready").exists, "the stage did not start")
    supervisor = supervisor_of(flow)
    with fault.timed("detected"):
        os.kill(supervisor, signal.SIGKILL)
        said, _ = flow.communicate(timeout=tiny.PATIENCE_S)
    assert "its supervisor was killed by SIGKILL" in said
    assert tiny.processes_of(store) == []


def test_the_next_attempt_ends_what_two_deaths_at_once_left_behind(store, fault):
    fault.name, fault.stage = "SIGKILL of flow and supervisor at once", "download"
    flow = start_refresh(store, "family")
    tiny.eventually((work_of(store) / "scratch" / "ready").exists, "the stage did not start")
    supervisor = supervisor_of(flow)
    os.kill(flow.pid, signal.SIGSTOP)
    os.kill(supervisor, signal.SIGKILL)
    os.kill(flow.pid, signal.SIGKILL)
    flow.wait(tiny.PATIENCE_S)
    tiny.eventually(lambda: supervisor not in living_processes(), "the supervisor lives")
    assert tiny.processes_of(store), "no process was there to end the children in other sessions"
    with fault.timed("recovered"):
        tiny.build(store, "ok")
    assert tiny.processes_of(store) == []


def test_a_stage_that_is_stopped_leaves_nothing(store):
    stop = threading.Event()
    notes = tiny.Notes()
    planned = tiny.planned_stages(store, {"rows": tiny.stage("family")})["rows"]
    ready = "scratch/ready"
    threading.Thread(target=lambda: (tiny.eventually((work_of(store) / ready).exists, "no start"), stop.set())).start()
    with pytest.raises(RefreshStoppedError, match="rows was stopped"):
        run_stage(planned, {}, store, notes, stop=stop, launch=tiny.launch)
    assert tiny.processes_of(store) == []
    assert isinstance(notes.outcomes[0].error, RefreshStoppedError)


def test_a_stage_outlives_the_thread_that_started_it(store):
    """A stage survives the end of its starting thread (Prefect's are pooled), which the kernel signals to children."""

    def launch_in_a_thread(work, config):
        started = []
        thread = threading.Thread(target=lambda: started.append(tiny.launch(work, config)))
        thread.start()
        thread.join()
        return started[0]

    planned = tiny.planned_stages(store, {"rows": tiny.stage("ok", environment={"TINY_SECONDS": "0.5"})})["rows"]
    assert run_stage(planned, {}, store, tiny.Notes(), launch=launch_in_a_thread).state == "built"


def test_shared_memory_of_killed_processes_is_removed(store):
    stop = threading.Event()
    planned = tiny.planned_stages(store, {"rows": tiny.stage("shared_memory")})["rows"]
    file = Path("/dev/shm") / f"test-{os.getpid()}-{store.root.parent.name}"
    planned.config.execution.environment["TINY_SHARED_MEMORY"] = file.name

    def is_mapped():
        return file.exists() and file.read_bytes()[:1] == b"x"

    threading.Thread(target=lambda: (tiny.eventually(is_mapped, "no shared memory"), stop.set())).start()
    with pytest.raises(RefreshStoppedError):
        run_stage(planned, {}, store, tiny.Notes(), stop=stop, launch=tiny.launch)
    assert not file.exists()


def test_a_killed_rank_is_named_and_takes_the_others_along(store, fault):
    fault.name, fault.stage = "SIGKILL of rank 1, rank 0 hangs", "train"
    tree = {
        "base": tiny.model_stage(),
        "rows": tiny.stage("ok"),
        "sft": {
            "kind": "train",
            "method": "sft",
            "model": "base",
            "data": {"dataset": "rows"},
            "global_batch_size": 2,
            "learning_rate": 1e-3,
            "layout": {"dp_shard": 2},
            "execution": {"environment": {"TINY": "rank_killed"}, "threads": 1},
        },
    }
    planned = tiny.planned_stages(store, tree)
    upstream = {}
    for name in ("base", "rows"):
        upstream[name] = run_stage(planned[name], upstream, store, tiny.Notes(), launch=tiny.launch)
    match = "sft ended, because rank 1 was killed by SIGKILL"
    with fault.timed("detected"), pytest.raises(StageCrashError, match=match):
        run_stage(planned["sft"], upstream, store, tiny.Notes(), launch=tiny.launch)
    assert tiny.processes_of(store) == []


def test_a_server_goes_on_after_its_artifact_is_committed_until_it_is_stopped(store):
    tree = {
        "base": tiny.model_stage(),
        "serve": {"kind": "serve", "model": "base", "execution": tiny.stage("serve")["execution"]},
        "scores": {"kind": "evaluate", "model": "serve", "tasks": ["a"], "execution": tiny.stage("ok")["execution"]},
    }
    planned = tiny.planned_stages(store, tree)
    built = {}
    for name in planned:
        built[name] = run_stage(planned[name], built, store, tiny.Notes(), launch=tiny.launch)
    served = built["serve"]
    assert served.state == "built"
    assert served.server.alive()
    stage_input = json.loads((built["scores"].artifact / "config.json").read_text())
    assert stage_input["leases"]["serve"]["url"] == "http://127.0.0.1:1"
    assert set(stage_input["inputs"]) == {"serve", "base"}
    served.server.stop()
    assert not served.server.alive()
    assert tiny.processes_of(store) == []


# ------------------------------------------------------------------------------------------------- work is not lost


def test_a_killed_refresh_resumes_at_its_last_checkpoint(store, fault):
    fault.name, fault.stage = "SIGKILL of flow", "download"
    flow = start_refresh(store, "linger")
    tiny.eventually((work_of(store) / "scratch" / "ready").exists, "no checkpoint")
    with fault.timed("detected"):
        flow.kill()
        flow.wait(tiny.PATIENCE_S)
        tiny.eventually(lambda: not tiny.processes_of(store), "processes are left")
    notes = tiny.Notes()
    with fault.timed("recovered"):
        built = tiny.build(store, "steps", notes=notes)
    assert built.metrics["first_step"] == 5
    assert notes.attempts[0].resumed
    steps = [json.loads(line)["step"] for line in (built.artifact / "metrics.jsonl").read_text().splitlines()]
    assert sorted(set(steps)) == list(range(10))
    assert not (built.artifact / "scratch").exists()
    assert not (built.artifact / "half").exists(), "what the dead attempt wrote beside its scratch is gone"


def test_a_forced_stage_starts_from_nothing_but_its_retry_resumes(store):
    planned = tiny.planned_stages(store, {"rows": tiny.stage("pause")})["rows"]
    assert not tiny.interrupt(planned, {}, store).resumed
    assert tiny.interrupt(planned, {}, store).resumed
    forced = tiny.planned_stages(store, {"rows": tiny.stage("pause")}, force=("rows",))["rows"]
    assert not tiny.interrupt(forced, {}, store, attempt=1).resumed
    assert tiny.interrupt(forced, {}, store, attempt=2).resumed


def test_scratch_made_from_other_content_is_not_resumed(store):
    def resumed(content: str, force: tuple[str, ...] = ()) -> bool:
        tree = {
            "base": tiny.model_stage(),
            "rows": tiny.stage("ok", environment={"TINY_CONTENT": content}),
            "sft": {
                "kind": "train",
                "method": "sft",
                "model": "base",
                "data": {"dataset": "rows"},
                "global_batch_size": 1,
                "learning_rate": 1e-3,
                "execution": tiny.stage("pause")["execution"],
            },
        }
        planned = tiny.planned_stages(store, tree, force)
        built = {}
        for name in ("base", "rows"):
            built[name] = run_stage(planned[name], built, store, tiny.Notes(), launch=tiny.launch)
        return tiny.interrupt(planned["sft"], built, store).resumed

    assert not resumed("first")
    assert resumed("first")
    assert not resumed("second", force=("rows",))


def test_of_two_refreshes_at_once_one_builds_and_the_other_finds_it_cached(store):
    first = start_refresh(store, "pause")
    release = work_of(store) / "scratch" / "release"
    tiny.eventually(release.with_name("ready").exists, "the stage did not start")
    second = start_refresh(store, "pause")
    assert second.stdout.readline() == "waits\n"
    release.touch()
    ended = [flow.communicate(timeout=tiny.PATIENCE_S)[0].split()[-1] for flow in (first, second)]
    assert ended == ["built", "cached"]
    assert len(store.index().artifacts) == 1
