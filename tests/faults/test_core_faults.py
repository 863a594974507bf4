"""Whatever dies, no process of a stage stays behind, nothing half-made is taken for an artifact, and work resumes.

Real processes throughout; only what the stage computes is small.
"""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import tiny

from flows.launch import local
from flows.runner import run_stage
from flows.store import Store
from stages.errors import (
    DataError,
    RefreshStoppedError,
    StageCrashError,
    StageTimeoutError,
    StoreError,
    TransientError,
)
from stages.supervisor import TOKEN_VARIABLE, living_processes, marked_processes

PATIENCE_S = 30.0


@pytest.fixture
def store(tmp_path):
    return Store(tmp_path / "store")


def eventually(condition, what: str):
    end = time.monotonic() + PATIENCE_S
    while not (found := condition()):
        assert time.monotonic() < end, what
        time.sleep(0.02)
    return found


def work_of(store: Store) -> Path:
    return eventually(lambda: next(store.root.glob(".work/download/*"), None), "no work folder")


def processes_of(store: Store) -> list[int]:
    """Living processes that name this store on their command line, and all that bear a token of theirs."""
    found = set()
    for pid in living_processes():
        try:
            command = Path(f"/proc/{pid}/cmdline").read_bytes()
            tokens = Path(f"/proc/{pid}/environ").read_bytes()
        except OSError:
            continue
        if str(store.root).encode() in command + tokens:
            found.add(pid)
    return sorted(found - {os.getpid()})


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
    return eventually(
        lambda: next((pid for pid, (parent, _) in living_processes().items() if parent == flow.pid), None),
        "the flow started no supervisor",
    )


# ------------------------------------------------------------------------------------------- nothing is left running


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_no_process_outlives_a_flow_that_is_killed(store, number):
    flow = start_refresh(store, "family")
    eventually((work_of(store) / "scratch" / "ready").exists, "the stage did not start")
    assert len(processes_of(store)) >= 6, "flow, supervisor, stage, two children and an orphan"
    flow.send_signal(number)
    flow.wait(PATIENCE_S)
    eventually(lambda: not processes_of(store), f"{processes_of(store)} are left")
    assert store.index().artifacts == ()


def test_no_process_outlives_a_supervisor_that_is_killed(store):
    flow = start_refresh(store, "family")
    eventually((work_of(store) / "scratch" / "ready").exists, "the stage did not start")
    os.kill(supervisor_of(flow), signal.SIGKILL)
    said, _ = flow.communicate(timeout=PATIENCE_S)
    assert "its supervisor was killed by SIGKILL" in said
    assert processes_of(store) == []


def test_the_next_attempt_ends_what_two_deaths_at_once_left_behind(store):
    flow = start_refresh(store, "family")
    eventually((work_of(store) / "scratch" / "ready").exists, "the stage did not start")
    supervisor = supervisor_of(flow)
    os.kill(flow.pid, signal.SIGSTOP)
    os.kill(supervisor, signal.SIGKILL)
    os.kill(flow.pid, signal.SIGKILL)
    flow.wait(PATIENCE_S)
    eventually(lambda: supervisor not in living_processes(), "the supervisor lives")
    assert processes_of(store), "nobody was there to end the children in other sessions"
    tiny.build(store, "ok")
    assert processes_of(store) == []


def test_a_stage_that_is_stopped_leaves_nothing(store):
    stop = threading.Event()
    notes = tiny.Notes()
    planned = tiny.planned_stages(store, {"rows": tiny.stage("family")})["rows"]
    threading.Timer(1.0, stop.set).start()
    with pytest.raises(RefreshStoppedError, match="rows was stopped"):
        run_stage(planned, {}, store, notes, stop=stop, launch=tiny.launch)
    assert processes_of(store) == []
    assert isinstance(notes.outcomes[0].error, RefreshStoppedError)


def test_a_stage_outlives_the_thread_that_started_it(store):
    """Prefect runs tasks in the threads of a pool, and a parent-death signal would come when such a thread ends."""

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
    file = Path("/dev/shm") / f"test-{store.root.parent.name}"
    planned.config.execution.environment["TINY_SHARED_MEMORY"] = file.name
    threading.Thread(target=lambda: (eventually(file.exists, "no shared memory"), stop.set())).start()
    with pytest.raises(RefreshStoppedError):
        run_stage(planned, {}, store, tiny.Notes(), stop=stop, launch=tiny.launch)
    assert not file.exists()


def test_a_killed_rank_is_named_and_takes_the_others_along(store):
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
    with pytest.raises(StageCrashError, match="sft ended, because rank 1 was killed by SIGKILL"):
        run_stage(planned["sft"], upstream, store, tiny.Notes(), launch=tiny.launch)
    assert processes_of(store) == []


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
    told = json.loads((built["scores"].artifact / "config.json").read_text())
    assert told["leases"]["serve"]["url"] == "http://127.0.0.1:1"
    assert set(told["inputs"]) == {"serve", "base"}
    served.server.stop()
    assert not served.server.alive()
    assert processes_of(store) == []


# ------------------------------------------------------------------------------------------------- work is not lost


def test_a_killed_refresh_resumes_at_its_last_checkpoint(store):
    flow = start_refresh(store, "steps")
    checkpoint = work_of(store) / "scratch" / "step"
    eventually(lambda: checkpoint.exists() and checkpoint.read_text() >= "3", "no checkpoint")
    flow.kill()
    flow.wait(PATIENCE_S)
    eventually(lambda: not processes_of(store), "processes are left")
    notes = tiny.Notes()
    built = tiny.build(store, "steps", notes=notes)
    assert built.metrics["first_step"] >= 3
    assert notes.attempts[0].resumed
    steps = [json.loads(line)["step"] for line in (built.artifact / "metrics.jsonl").read_text().splitlines()]
    assert sorted(set(steps)) == list(range(10))
    assert not (built.artifact / "scratch").exists()
    assert not (built.artifact / "half").exists(), "what the dead attempt wrote beside its scratch is gone"


def test_a_forced_stage_starts_from_nothing_but_its_retry_resumes(store):
    planned = tiny.planned_stages(store, {"rows": tiny.stage("steps")})["rows"]
    assert not tiny.interrupt(planned, {}, store).resumed
    assert tiny.interrupt(planned, {}, store).resumed
    forced = tiny.planned_stages(store, {"rows": tiny.stage("steps")}, force=("rows",))["rows"]
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
                "execution": tiny.stage("steps")["execution"],
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
    flows = [start_refresh(store, "steps") for _ in range(2)]
    ended = sorted(flow.communicate(timeout=PATIENCE_S)[0].split() for flow in flows)
    assert ended == [["built"], ["cached", "waited"]]
    assert len(store.index().artifacts) == 1


# --------------------------------------------------------------------------------------- how a stage ended is told


@pytest.mark.parametrize(
    ("mode", "error", "says"),
    [
        ("known_error", DataError, "^row 3 has no messages$"),
        ("bug", StageCrashError, "rows failed: KeyError: 'x'.*Traceback: something of ours"),
        ("killed", StageCrashError, r"rows was killed by SIGKILL \(out of memory\?\).*the last thing it said"),
        ("transient", TransientError, "asked to be tried again"),
        ("silent", StageCrashError, "left no readable result.json"),
        ("no_such_mode", StageCrashError, "rows exited with 1, without a word.*KeyError: 'no_such_mode'"),
    ],
)
def test_a_failure_becomes_the_error_that_it_is(store, mode, error, says):
    notes = tiny.Notes()
    with pytest.raises(error, match=f"(?s){says}"):
        tiny.build(store, mode, notes=notes)
    assert notes.said[0] == "started"
    assert notes.said[-2:] == ["tick", "ended"]
    assert type(notes.outcomes[0].error) is error
    assert store.index().artifacts == ()


def test_the_error_of_an_earlier_attempt_is_forgotten(store):
    with pytest.raises(DataError):
        tiny.build(store, "known_error")
    with pytest.raises(StageCrashError):
        tiny.build(store, "killed")
    assert tiny.build(store, "ok").state == "built"


def test_a_stage_that_takes_too_long_is_stopped(store):
    started_s = time.monotonic()
    with pytest.raises(StageTimeoutError, match=r"rows ran for more than 1 s .*stages\.rows\.execution\.timeout_s"):
        tiny.build(store, "family", timeout_s=1)
    assert time.monotonic() - started_s < PATIENCE_S
    assert processes_of(store) == []


# ------------------------------------------------------------------------------------------------ the store at fault


def test_a_built_stage_is_cached_and_starts_nothing(store):
    first = tiny.build(store, "ok")
    notes = tiny.Notes()
    again = tiny.build(store, "ok", notes=notes)
    assert (first.state, again.state) == ("built", "cached")
    assert (again.record, again.mlflow_run_id) == (first.record, "run-of-mlflow")
    assert notes.said == []


def test_a_damaged_artifact_is_named_not_used_and_rebuilt_on_request(store):
    built = tiny.build(store, "ok")
    (built.artifact / "data" / "content").write_text("cut")
    with pytest.raises(StoreError, match=r"damaged: data/content has 3 bytes instead of 7; .*--force rows"):
        tiny.build(store, "ok")
    assert tiny.build(store, "ok", force=True).state == "built"
    assert tiny.build(store, "ok").state == "cached"


def test_dependents_of_a_forced_stage_run_only_if_its_content_changed(store):
    def refresh(content: str, force: tuple[str, ...] = ()):
        tree = {
            "base": tiny.model_stage(),
            "rows": tiny.stage("ok", environment={"TINY_CONTENT": content}),
            "awq": {
                "kind": "quantize",
                "model": "base",
                "method": "awq",
                "calibration": {"dataset": "rows"},
                "execution": tiny.stage("ok")["execution"],
            },
        }
        built = {}
        for name, planned in tiny.planned_stages(store, tree, force).items():
            built[name] = run_stage(planned, built, store, tiny.Notes(), launch=tiny.launch)
        return {name: one.state for name, one in built.items()}

    assert set(refresh("first").values()) == {"built"}
    assert refresh("first", ("rows",)) == {"base": "cached", "rows": "built", "awq": "cached"}
    assert refresh("second", ("rows",)) == {"base": "cached", "rows": "built", "awq": "built"}


@pytest.mark.skipif(os.geteuid() != 0, reason="another user than the store's owner is needed")
def test_a_store_that_may_not_be_written_serves_what_it_has_and_says_what_it_cannot(tmp_path):
    store = Store(tmp_path / "store")
    tiny.build(store, "ok")
    code = (
        "import os, sys; sys.path.insert(0, sys.argv[1]); import tiny; from pathlib import Path\n"
        "from flows.store import Store\n"
        "os.setuid(65534); store = Store(Path(sys.argv[2]))\n"
        "print(tiny.build(store, 'ok').state)\n"
        "try: tiny.build(store, 'ok', force=True)\n"
        "except Exception as error: print(type(error).__name__, error)\n"
    )
    for folder in (*tmp_path.parents[:2], tmp_path, store.root, *store.root.rglob("*")):
        folder.chmod(folder.stat().st_mode | 0o055)
    done = subprocess.run(
        [sys.executable, "-c", code, str(Path(tiny.__file__).parent), str(store.root)],
        capture_output=True,
        text=True,
        check=False,
    )
    said = done.stdout.splitlines()
    assert said[0] == "cached", done.stderr
    assert said[1].startswith("StoreError cannot ")
    assert "Permission denied" in said[1]


# ------------------------------------------------------------------------------------------------- the real launcher


def test_a_real_stage_process_is_launched_with_its_environment(store):
    tree = {"rows": {"kind": "download", "dataset": "builtin/addition", "execution": {"threads": 1}}}
    planned = tiny.planned_stages(store, tree)["rows"]
    built = run_stage(planned, {}, store, tiny.Notes())
    assert built.state == "built"
    assert (built.artifact / "data").is_dir()
    environment = local.environment(planned.config)
    assert environment["OMP_NUM_THREADS"] == "1"
    assert environment["DO_NOT_TRACK"] == "true"
    assert TOKEN_VARIABLE not in environment
    assert marked_processes("no such token") == []
