"""Which refreshes run, and what a retry asks for."""

import os

import pytest

from flows.ledger.history import RefreshRecord, RunningRefreshes, StageEntry, folder_of
from flows.ledger.process_identity import ProcessIdentity
from flows.running.refresh_run import retry_of

DEAD = ProcessIdentity(pid=1, started_ticks=-1)


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("LIFECYCLE_HOME", str(tmp_path))
    return tmp_path


def record(home, name, *, recipe="nightly", process=None, **fields):
    made = RefreshRecord(
        refresh=name,
        recipe=recipe,
        recipe_path=home / "nightly.yaml",
        started_ms=1,
        process=process or ProcessIdentity.own(),
        hardware="1 × abacus",
        git_commit=None,
        stages={},
    )
    return made.model_copy(update=fields)


def write(made):
    folder_of(made.refresh).write(made)
    return made


def test_a_refresh_runs_until_it_ends_or_its_process_is_dead(home):
    running = RunningRefreshes()
    alive = write(record(home, "alive"))
    write(record(home, "dead", process=DEAD))
    write(record(home, "other", recipe="other"))
    assert [one.refresh for one in running.of("nightly")] == ["alive"]
    assert sorted(one.refresh for one in running.all()) == ["alive", "dead", "other"]
    write(alive.model_copy(update={"state": "completed"}))
    assert running.of("nightly") == []


def test_a_refresh_that_is_retried_runs_again(home):
    running = RunningRefreshes()
    failed = write(record(home, "failed", state="failed"))
    assert running.of("nightly") == []
    again = write(failed.model_copy(update={"state": "running", "num_tries": 2}))
    os.utime(folder_of("failed").path / "refresh.json", ns=(10**18, 10**18))
    assert running.of("nightly") == [again]


def test_a_retry_asks_for_the_same_but_forces_nothing_that_was_done(home):
    stages = {
        name: StageEntry(kind="download", version="0123456789ab", state=state)
        for name, state in {"base": "built", "rows": "cached", "sft": "failed", "awq": "skipped"}.items()
    }
    failed = record(home, "failed", overrides=("stages.sft.steps=3",), until="awq", force=tuple(stages), stages=stages)
    request = retry_of(failed)
    assert (request.recipe, request.overrides) == (str(home / "nightly.yaml"), ("stages.sft.steps=3",))
    assert (request.until, request.force) == ("awq", ("sft", "awq"))
