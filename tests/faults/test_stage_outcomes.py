"""Each way in which a stage can fail raises its own error, and a damaged or locked store is never used silently."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import tiny

from flows.launch import local
from flows.launch.stage_process import NONE_COUNTED
from flows.running.runner import run_stage
from flows.store.store import Store
from stages.core.errors import DataError, StageCrashError, StageTimeoutError, StoreError, TransientError
from stages.core.process_tree import TOKEN_VARIABLE, marked_processes


@pytest.fixture
def store(tmp_path):
    return Store(tmp_path / "store")


# --------------------------------------------------------------------------------------------- how a stage has ended


@pytest.mark.parametrize(
    ("mode", "error", "says"),
    [
        ("known_error", DataError, "^row 3 has no messages$"),
        ("bug", StageCrashError, "rows failed: KeyError: 'x'.*Traceback: something of ours"),
        ("killed", StageCrashError, rf"rows was killed by SIGKILL \({NONE_COUNTED}\).*the last thing it said"),
        ("transient", TransientError, "asked to be tried again"),
        ("silent", StageCrashError, "left no readable result.json"),
        ("no_such_mode", StageCrashError, "rows exited with 1 and left no error message.*KeyError: 'no_such_mode'"),
    ],
)
def test_a_failure_becomes_the_error_that_it_is(store, fault, mode, error, says):
    fault.name, fault.stage = f"process ends: {mode.replace('_', ' ')}", "download"
    notes = tiny.Notes()
    with fault.timed("detected"), pytest.raises(error, match=f"(?s){says}"):
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


def test_a_stage_that_takes_too_long_is_stopped(store, fault):
    fault.name, fault.stage = "hangs beyond timeout_s (1 s)", "download"
    started_s = time.monotonic()
    with (
        fault.timed("detected"),
        pytest.raises(StageTimeoutError, match=r"rows ran for more than 1 s .*stages\.rows\.execution\.timeout_s"),
    ):
        tiny.build(store, "family", timeout_s=1)
    assert time.monotonic() - started_s < tiny.PATIENCE_S
    assert tiny.processes_of(store) == []


# ------------------------------------------------------------------------------------------------ the store at fault


def test_a_built_stage_is_cached_and_starts_nothing(store):
    first = tiny.build(store, "ok")
    notes = tiny.Notes()
    again = tiny.build(store, "ok", notes=notes)
    assert (first.state, again.state) == ("built", "cached")
    assert (again.record, again.record.attempt, again.metrics) == (first.record, "tiny/rows-1", first.metrics)
    assert notes.said == []


def test_a_damaged_artifact_is_named_not_used_and_rebuilt_on_request(store, fault):
    fault.name, fault.stage, fault.lost = "dataset cut off", "download", "the stage"
    built = tiny.build(store, "ok")
    (built.artifact / "data" / "content").write_text("cut")
    with (
        fault.timed("detected"),
        pytest.raises(StoreError, match=r"damaged: data/content has 3 bytes instead of 7; .*--force rows"),
    ):
        tiny.build(store, "ok")
    with fault.timed("recovered"):
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
def test_a_store_that_may_not_be_written_serves_what_it_has_and_says_what_it_cannot(tmp_path, fault):
    fault.name, fault.stage = "permission denied", "download"
    store = Store(tmp_path / "store")
    tiny.build(store, "ok")
    code = (
        "import os, sys; sys.path.insert(0, sys.argv[1]); import tiny; from pathlib import Path\n"
        "from flows.store.store import Store\n"
        "os.setuid(65534); store = Store(Path(sys.argv[2]))\n"
        "print(tiny.build(store, 'ok').state)\n"
        "try: tiny.build(store, 'ok', force=True)\n"
        "except Exception as error: print(type(error).__name__, error)\n"
    )
    of_pytest = [folder for folder in tmp_path.parents if "pytest-of-" in str(folder)]
    for folder in (*of_pytest, tmp_path, store.root, *store.root.rglob("*")):
        folder.chmod(folder.stat().st_mode | 0o055)
    command = [sys.executable, "-c", code, str(Path(tiny.__file__).parent), str(store.root)]
    with fault.timed("detected"):
        done = subprocess.run(command, capture_output=True, text=True, check=False)
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
