"""Event logs (ledgers) of refreshes can be read after crashes, full disks and retries, and while a refresh runs."""

import ast
import os
import shutil
import time
from pathlib import Path

import pytest

from flows.cli.live import summary
from flows.cli.show import state_of
from flows.ledger.events import (
    AttemptBegan,
    FlowRunKnown,
    RefreshEnded,
    StageCached,
    StageFailed,
)
from flows.ledger.home import home_identity
from flows.ledger.process_identity import ProcessIdentity
from flows.ledger.record import COPIED, KILLED, with_time_so_far
from flows.ledger.refreshes import RunningRefreshes, close_interrupted, end_of, ledger_of, ledgers
from flows.report.sentences import outcome_sentence, result_sentence
from flows.running.request import retry_of
from flows.tracking import shipper
from flows.tracking.shipper import ship_pending, shipper_lock
from stages.core.errors import StoreError
from tests.beginnings import beginning

ROOT = Path(__file__).parents[4]
DEAD = ProcessIdentity(pid=1, started_ticks=-1)
ENDED = RefreshEnded(state="completed", seconds=1.0)


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("LIFECYCLE_HOME", str(tmp_path))
    return tmp_path


@pytest.fixture
def begin(home):
    """Provide a function that begins a refresh with the given stages, and returns its event log (ledger)."""

    def begin(name, *stages, recipe="nightly", process=None, **fields):
        ledger = ledger_of(name)
        process = process or ProcessIdentity.own()
        ledger.append(beginning(home, dict.fromkeys(stages, "download"), name, recipe, process=process, **fields))
        return ledger

    return begin


def attempt(ledger, home, stage, number=1):
    work = home / "work" / stage
    work.mkdir(parents=True, exist_ok=True)
    ledger.append(AttemptBegan(stage=stage, number=number, work=work, first_byte=0, params={}, tags={"kind": "train"}))
    return ledger.read().attempts[f"{stage}-{number}"]


def finish(ledger, home, stage, **said):
    ledger.append(end_of(attempt(ledger, home, stage), "finished", **said))


def test_a_refresh_runs_until_it_ends_or_its_process_is_dead(begin):
    running = RunningRefreshes()
    alive = begin("alive")
    begin("dead", process=DEAD)
    begin("other", recipe="other")
    assert [one.refresh for one in running.of("nightly")] == ["alive"]
    assert sorted(one.refresh for one in running.all()) == ["alive", "dead", "other"]
    alive.append(ENDED)
    assert running.of("nightly") == []


def test_what_runs_is_shown_with_the_time_that_it_has_taken(begin, home):
    ledger = begin("alive", "rows", "base")
    started_ms = attempt(ledger, home, "rows").began.time_ms
    record = with_time_so_far(ledger.read(), started_ms + 61_000)
    assert record.stages["rows"].seconds == 61 and record.stages["base"].seconds == 0
    assert record.seconds >= 61
    finish(ledger, home, "base", seconds=4.0)
    assert with_time_so_far(ledger.read(), started_ms + 61_000).stages["base"].seconds == 4
    ledger.append(RefreshEnded(state="failed", seconds=5.0, error=None))
    assert with_time_so_far(ledger.read(), started_ms + 61_000) == ledger.read()


def test_a_refresh_that_is_retried_runs_again_and_keeps_its_attempts(begin, home):
    running = RunningRefreshes()
    failed = begin("failed", "sft")
    failed.append(end_of(attempt(failed, home, "sft"), "failed", error="no memory", error_class="ResourceError"))
    failed.append(RefreshEnded(state="failed", seconds=1.0, error="failed: sft"))
    assert failed.read().stages["sft"].error == "no memory"
    assert running.of("nightly") == []
    begin("failed", "sft")
    (again,) = running.of("nightly")
    assert (again.num_tries, list(again.attempts), again.stages["sft"].state) == (2, ["sft-1"], "waiting")


def test_a_retry_asks_for_the_same_but_forces_nothing_that_was_done(begin, home):
    stages = ("base", "sft", "awq")
    failed = begin("failed", *stages, overrides=("stages.sft.steps=3",), until="awq", force=stages)
    finish(failed, home, "base")
    failed.append(end_of(attempt(failed, home, "sft"), "failed", error="no memory"))
    failed.append(RefreshEnded(state="failed", seconds=1.0))
    request = retry_of(failed.read())
    assert (request.recipe, request.overrides) == (str(home / "recipe.yaml"), ("stages.sft.steps=3",))
    assert (request.until, request.force) == ("awq", ("sft", "awq"))


def test_a_built_stage_has_the_metrics_and_the_verdict_that_it_said(begin, home):
    ledger = begin("one", "promote")
    said = {"metrics": {"loss": float("nan"), "score": 0.5}, "tags": {"verdict": "promoted"}, "seconds": 2.0}
    finish(ledger, home, "promote", **said)
    entry = ledger.read().stages["promote"]
    assert (entry.state, entry.metrics["score"], entry.verdict) == ("built", 0.5, "promoted")
    assert entry.metrics["loss"] != entry.metrics["loss"]
    assert (entry.attempt, ledger.read().attempts["promote-1"].metrics["stage_time_s"]) == ("one/promote-1", 2.0)


def test_a_killed_refresh_is_closed_and_what_it_had_not_done_is_skipped(begin, home):
    ledger = begin("dead", "rows", "sft", "awq", process=DEAD)
    finish(ledger, home, "rows")
    work = attempt(ledger, home, "sft").folder
    (work / "metrics.jsonl").write_text('{"step": 1}\n')
    assert ledger.read().interrupted
    assert close_interrupted() == ["dead"]
    closed = ledger.read()
    assert (closed.state, closed.error, closed.killed) == ("failed", KILLED, True)
    assert {name: entry.state for name, entry in closed.stages.items()} == {
        "rows": "built",
        "sft": "failed",
        "awq": "skipped",
    }
    ended = closed.attempts["sft-1"]
    assert (ended.outcome, ended.last_byte) == ("killed", len('{"step": 1}\n'))
    assert close_interrupted() == []


def test_a_refresh_of_another_host_is_unknown_until_it_has_been_silent_for_long(begin, home):
    other = {"boot": "00000000-0000-0000-0000-000000000000", "host": "other"}
    ledger = begin("afar", "sft", process=ProcessIdentity.own().model_copy(update=other))
    attempt(ledger, home, "sft")
    size = ledger.size()
    assert (state_of(ledger.read()), ledger.read().killed) == ("unknown, on other", False)
    assert [one.refresh for one in RunningRefreshes().of("nightly")] == ["afar"]
    assert close_interrupted() == [] and ledger.size() == size
    long_ago_s = time.time() - 3600
    os.utime(ledger.file, (long_ago_s, long_ago_s))
    (ledger.folder / "heartbeat").touch()
    assert close_interrupted() == []
    os.utime(ledger.folder / "heartbeat", (long_ago_s, long_ago_s))
    assert state_of(ledger.read()) == "killed"
    assert close_interrupted() == ["afar"]
    assert ledger.read().error == KILLED


def test_in_a_copy_of_the_home_what_ran_is_over_and_in_the_original_it_goes_on(begin, home, monkeypatch):
    (home / "home").mkdir()
    monkeypatch.setenv("LIFECYCLE_HOME", str(home / "home"))
    ledger = begin("running", "sft", home=home_identity())
    attempt(ledger, home, "sft")
    shutil.copytree(home / "home", home / "copy")
    monkeypatch.setenv("LIFECYCLE_HOME", str(home / "copy"))
    copied = ledger_of("running").read()
    assert state_of(copied) == "copied"
    assert outcome_sentence(copied).startswith(
        "The refresh of nightly was copied with its home while it ran, after 0.0 s; of 1"
    )
    assert result_sentence(copied, [], []).startswith("How it ended, only the original home knows")
    assert close_interrupted() == ["running"]
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "https://mlflow.team")  # whose runs of it are the original's
    ship_pending(client=None)  # which would be asked at once
    assert not (ledger_of("running").folder / "mlflow.json").exists()
    closed = ledger_of("running").read()
    assert (closed.state, closed.error, closed.attempts["sft-1"].ended.error) == ("failed", COPIED, COPIED)
    assert "killed" not in outcome_sentence(closed)
    begin("running", "sft", home=home_identity())
    assert ledger_of("running").read().standing == "alive"
    monkeypatch.setenv("LIFECYCLE_HOME", str(home / "home"))
    assert close_interrupted() == [] and ledger.read().standing == "alive"


def test_a_moved_home_names_the_files_of_its_stages_where_they_are(begin, tmp_path, monkeypatch):
    before, after = tmp_path / "before", tmp_path / "after"
    monkeypatch.setenv("LIFECYCLE_HOME", str(before))
    ledger = begin("night", "base", "gone")
    for stage in ("base", "gone"):
        artifact = before / "store" / "download" / f"{stage}-0123456789ab"
        artifact.mkdir(parents=True)
        ledger.append(StageCached(stage=stage, artifact=artifact, attempt=None, seconds=0.0))
    work = before / "store" / ".work" / "train" / "sft-0123456789ab"
    work.mkdir(parents=True)
    ledger.append(AttemptBegan(stage="base", number=1, work=work, first_byte=0, params={}, tags={}))
    before.rename(after)
    (after / "store" / "download" / "gone-0123456789ab").rmdir()
    monkeypatch.setenv("LIFECYCLE_HOME", str(after))
    stages = ledger_of("night").read().stages
    assert stages["base"].artifact == after / "store" / "download" / "base-0123456789ab"
    assert stages["base"].work == after / "store" / ".work" / "train" / "sft-0123456789ab"
    assert stages["gone"].artifact == before / "store" / "download" / "gone-0123456789ab"


@pytest.mark.parametrize("outcome", ["cancelled", "killed"])
def test_what_was_stopped_on_request_is_cancelled_everywhere(begin, home, outcome):
    """A refresh stopped on request is cancelled, also where earlier versions recorded `killed`; a dead one is not."""
    ledger = begin("stopped", "rows", "sft")
    ended = end_of(attempt(ledger, home, "rows"), outcome, error="it was stopped", error_class="RefreshStoppedError")
    ledger.append(ended)
    waited = {"error": "it was waiting", "error_class": "RefreshStoppedError"}
    ledger.append(StageFailed(stage="sft", seconds=0.0, **waited))
    ledger.append(RefreshEnded(state="cancelled", seconds=1.0))
    record = ledger.read()
    assert {name: entry.state for name, entry in record.stages.items()} == {"rows": "cancelled", "sft": "cancelled"}
    assert (record.state, record.attempts["rows-1"].outcome) == ("cancelled", "cancelled")
    assert "cancelled after" in summary(record.stages["rows"])


def test_whoever_closes_a_refresh_too_late_changes_nothing(begin, home):
    """Recording the end of a dead refresh a second time, when a retry already runs, changes nothing.

    Two processes may detect a dead refresh at once, and a retry may begin before the second one records it.
    """
    ledger = begin("dead", "sft", process=DEAD)
    attempt(ledger, home, "sft")
    size = ledger.file.stat().st_size
    close_interrupted()
    closing = ledger.file.read_bytes()[size:]
    begin("dead", "sft")
    attempt(ledger, home, "sft", number=2)
    before = ledger.read()
    with ledger.file.open("ab") as stream:
        stream.write(closing)
    assert ledger.read() == before
    assert before.state == "running"


def test_half_a_line_is_left_out_and_does_not_spoil_the_next_one(begin):
    ledger = begin("torn", "sft")
    with ledger.file.open("ab") as stream:
        stream.write(b'{"event":"refresh_ended","state":"fail')
    assert ledger.read().state == "running"
    ledger.append(FlowRunKnown(prefect_flow_run_id="abc", prefect_run_count=1))
    ledger.append(ENDED)
    record = ledger.read()
    assert (record.state, record.prefect_flow_run_id) == ("completed", "abc")


def test_a_whole_line_that_is_not_understood_is_an_error_that_names_the_refresh(begin):
    ledger = begin("newer", "sft")
    with ledger.file.open("ab") as stream:
        stream.write(b'{"event":"refresh_teleported"}\n')
    with pytest.raises(StoreError, match="reading the ledger of refresh newer"):
        ledger.read()


@pytest.mark.parametrize(
    "damage", [b"", b"\0" * 4096, b'{"event":"refresh_teleported"}\n'], ids=["cut", "zeros", "newer"]
)
def test_a_damaged_ledger_is_named_once_and_the_others_are_closed(begin, capsys, damage):
    begin("dead", process=DEAD)
    begin("damaged").file.write_bytes(damage)
    running = RunningRefreshes()
    assert [one.refresh for one in running.all()] == ["dead"]
    assert "warning: passing over a refresh: reading the ledger of refresh damaged: " in capsys.readouterr().err
    assert [one.refresh for one in running.all()] == ["dead"]
    assert "damaged" not in capsys.readouterr().err
    assert close_interrupted() == ["dead"]
    assert ledger_of("dead").read().error == KILLED


def test_a_damaged_ledger_keeps_no_other_from_being_shipped(begin, capsys, monkeypatch):
    begin("over").append(ENDED)
    begin("damaged").file.write_bytes(b"")
    shipped = []
    monkeypatch.setattr(shipper, "Shipper", lambda ledger, client: ledger.folder.name)
    monkeypatch.setattr(shipper, "_try_to_ship", shipped.append)
    ship_pending(client=None)
    assert shipped == ["over"]
    assert "not shipped: reading the ledger of refresh damaged" in capsys.readouterr().out


def test_a_folder_without_a_ledger_is_no_refresh(begin, home):
    begin("whole")
    (home / "ledger" / "never-begun").mkdir()
    assert [ledger.folder.name for ledger in ledgers()] == ["whole"]


def test_a_refresh_that_another_process_ships_is_left_to_it(begin):
    ledger = begin("over")
    ledger.append(ENDED)
    with shipper_lock(ledger):
        ship_pending(client=None)  # which would be asked at once
    assert not (ledger.folder / "mlflow.json").exists()


def test_the_events_of_attempts_are_read_by_the_ledger_alone():
    """Only the `ledger` package reads the recorded events of stage attempts; all other code uses `AttemptRecord`."""
    importers = {
        (str(file.relative_to(ROOT)), alias.name)
        for file in sorted((ROOT / "flows").rglob("*.py"))
        if "Attempt" in (text := file.read_text())
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
        if alias.name in ("AttemptBegan", "AttemptEnded") and file.parent.name != "ledger"
    }
    assert importers == {("flows/running/stage_observer.py", "AttemptBegan")}, "which writes the first"
