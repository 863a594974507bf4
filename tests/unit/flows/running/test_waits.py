"""A stage that waits for another refresh to build the same artifact does not count the wait as its time."""

import logging
import threading
from contextlib import contextmanager, suppress
from types import SimpleNamespace

import pytest

from flows.planning.plan import plan
from flows.recipe.recipe import load_stages
from flows.running import refresh_run, runner, stage_observer
from flows.running.refresh_run import RefreshRun
from flows.running.request import PlannedRefresh, RefreshRequest
from flows.store.store import Store
from stages.core.errors import RefreshStoppedError
from tests.promotion import commit, write_model

TREE = {"base": {"kind": "download", "model": "builtin/qwen3-1m"}}


class Clock:
    """Fake monotonic clock that stands still until a test sets it."""

    now_s = 0.0

    def monotonic(self):
        return self.now_s


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    for module in (refresh_run, runner, stage_observer):
        monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=clock.monotonic))
    return clock


@pytest.fixture
def run(tmp_path, monkeypatch, clock):
    monkeypatch.setenv("LIFECYCLE_HOME", str(tmp_path / "home"))
    store = Store(tmp_path / "store")
    recipe = load_stages("small", tmp_path, TREE)
    return RefreshRun(PlannedRefresh(RefreshRequest("small.yaml"), plan(recipe, {"base": {}}, store.index()), store))


@contextmanager
def waiting_for_another(run):
    """Make a stage wait for the duration of the context, as if another refresh were building the same artifact."""
    waits = threading.Event()
    append = run.append

    def appended(event):
        append(event)
        if event.event == "stage_waits":
            waits.set()

    def build():
        with suppress(RefreshStoppedError):
            run.build("base", 1, logging.getLogger())

    run.append = appended
    planned = run.plan.stages["base"]
    thread = threading.Thread(target=build)
    with run.store.lock(planned.kind, planned.resume_key, lambda: None):
        thread.start()
        waits.wait()
        yield
        if run.stop.is_set():
            thread.join()
    thread.join()


def test_one_that_is_stopped_while_it_waits_has_not_worked(run, clock):
    with waiting_for_another(run):
        clock.now_s = 1000.0
        run.stop.set()
    entry = run.record.stages["base"]
    assert (entry.state, entry.seconds) == ("cancelled", 0.0)


def test_one_that_finds_what_the_other_built_has_not_worked(run, clock):
    with waiting_for_another(run):
        commit(run.store, run.plan.stages["base"], {}, lambda work: write_model(work, "of another"))
        clock.now_s = 1000.0
    entry = run.record.stages["base"]
    assert (entry.state, entry.seconds) == ("cached", 0.0)
