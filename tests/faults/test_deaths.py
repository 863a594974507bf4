"""A killed stage is retried from its last checkpoint, as long as each retry gets further than the one before."""

import logging
import os
import subprocess
import sys

import pytest
import tiny
from memory import limited_memory

from flows.planning.plan import plan
from flows.recipe.recipe import load_stages
from flows.running import refresh_run
from flows.running.refresh_run import RefreshRun
from flows.running.request import PlannedRefresh, RefreshRequest
from flows.store.store import Store
from stages.core.errors import LifecycleError, ResourceError, ServerError, StageCrashError

MIB = 2**20


@pytest.fixture
def start(tmp_path, monkeypatch):
    """Provide a function that prepares a refresh, whose stages the test then runs one by one."""
    monkeypatch.setenv("LIFECYCLE_HOME", str(tmp_path / "home"))
    store = Store(tmp_path / "store")

    def start(tree):
        recipe = load_stages("deaths", tmp_path, tree)
        planned = plan(recipe, {name: {} for name in recipe.stages}, store.index())
        return RefreshRun(PlannedRefresh(RefreshRequest("deaths.yaml"), planned, store), launch=tiny.launch)

    return start


def training(mode, **environment):
    execution = {"environment": {"TINY": mode, **environment}, "threads": 1}
    fields = {"kind": "train", "method": "sft", "model": "base", "data": {"dataset": "rows"}, "execution": execution}
    return fields | {"global_batch_size": 2, "learning_rate": 1e-3}


def to_the_end(run, name):
    """Retry a stage until it succeeds, as the Prefect flow does, and return the number of tries."""
    number = 1
    while True:
        try:
            run.build(name, number, logging.getLogger())
        except LifecycleError:
            if not run.retries.is_due(name):
                raise
            assert run.record.stages[name].state == "waiting"
            number += 1
        else:
            return number


def outcomes(run, name):
    return [(attempt.outcome, attempt.ended.retried) for attempt in run.record.attempts_at(name)]


@pytest.mark.parametrize(
    ("deaths", "outcome"),
    [
        ("3", [("killed", True), ("finished", False)]),
        ("3,5", [("killed", True), ("killed", True), ("finished", False)]),
        ("3,3", [("killed", True), ("killed", False)]),
        ("3,5,7", [("killed", True), ("killed", True), ("killed", False)]),
    ],
    ids=["once", "again, further on", "again, no further", "more often than `retries`"],
)
def test_a_death_is_tried_again_from_the_checkpoint_while_there_is_a_newer_one(start, deaths, outcome):
    run = start({"base": tiny.model_stage(), "rows": tiny.stage("ok"), "sft": training("deaths", TINY_DEATHS=deaths)})
    to_the_end(run, "base")
    to_the_end(run, "rows")
    if outcome[-1][0] == "finished":
        to_the_end(run, "sft")
        assert run.record.stages["sft"].metrics["first_step"] == int(deaths[-1])
    else:
        with pytest.raises(StageCrashError, match="sft was killed by SIGKILL"):
            to_the_end(run, "sft")
        assert run.record.stages["sft"].state == "failed"
    assert outcomes(run, "sft") == outcome


@pytest.mark.parametrize(
    ("mode", "error", "outcome"),
    [
        ("killed", StageCrashError, [("killed", True), ("killed", False)]),
        ("server_killed", ServerError, [("killed", True), ("killed", False)]),
        ("known_error", LifecycleError, [("failed", False)]),
        ("bug", StageCrashError, [("failed", False)]),
        ("asked_to_end", StageCrashError, [("failed", False)]),
    ],
)
def test_a_stage_without_checkpoints_is_tried_again_once_after_a_death_alone(start, mode, error, outcome):
    run = start({"rows": tiny.stage(mode)})
    with pytest.raises(error):
        to_the_end(run, "rows")
    assert outcomes(run, "rows") == outcome


def test_an_evaluation_whose_server_was_killed_starts_one_on_the_very_slot_that_the_dead_one_held(start, monkeypatch):
    monkeypatch.setattr(refresh_run, "num_slots", lambda: 1)
    execution = tiny.stage("kills_server")["execution"]
    serve = {"kind": "serve", "model": "base", "execution": tiny.stage("serve")["execution"]}
    scores = {"kind": "evaluate", "model": "serve", "tasks": ["a"], "execution": execution}
    run = start({"base": tiny.model_stage(), "serve": serve, "scores": scores})
    for name in ("base", "serve"):
        to_the_end(run, name)
    assert to_the_end(run, "scores") == 2
    assert run.record.stages["scores"].metrics["had_server"] == 0
    run.finish()


def test_a_stage_that_the_kernel_kills_for_its_memory_says_so_and_is_not_tried_again(tmp_path, fault):
    fault.name, fault.stage = "out of memory", "download"
    with limited_memory(f"lifecycle-{os.getpid()}", 300 * MIB) as group, fault.timed("detected"):
        enter = f'echo $$ > {group / "cgroup.procs"}; exec "$@"'
        command = ["sh", "-c", enter, "sh", sys.executable, tiny.__file__, str(tmp_path / "store"), "hungry"]
        ended = subprocess.run(command, capture_output=True, text=True)
    assert f"{ResourceError.__name__}: rows was killed by the kernel, out of memory: 0.3 GiB limit of" in ended.stderr
    assert "raise its execution.slots" in ended.stderr
