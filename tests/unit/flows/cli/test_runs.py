"""`lifecycle runs` lists the runs of stages that are recorded in the event logs (ledgers) of refreshes."""

import pytest

from flows.cli.runs import as_text, not_listed, stage_runs
from flows.ledger.events import AttemptBegan
from flows.ledger.process_identity import ProcessIdentity
from flows.ledger.refreshes import end_of, ledger_of
from flows.tracking.cursor import Shipped, ShippedAttempt, write_shipped
from tests.beginnings import beginning


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("LIFECYCLE_HOME", str(tmp_path))
    return tmp_path


def record(home, refresh, recipe, *stages, process=None):
    """Write the event log (ledger) of a refresh whose stages each failed once, then succeeded; the last still runs."""
    ledger = ledger_of(refresh)
    ledger.append(
        beginning(home, dict.fromkeys(stages, "download"), refresh, recipe, process=process or ProcessIdentity.own())
    )
    tags = {"recipe": recipe, "kind": "download", "version": "0123456789ab"}
    for stage in stages:
        for number in (1, 2):
            ledger.append(AttemptBegan(stage=stage, number=number, work=home, first_byte=0, params={}, tags=tags))
            if (stage, number) != (stages[-1], 2):
                begun = ledger.read().attempts[f"{stage}-{number}"]
                outcome = "finished" if number == 2 else "failed"
                ledger.append(end_of(begun, outcome, metrics={"rows": 12345.0} if number == 2 else {}))
    shipped = {f"{stages[0]}-1": ShippedAttempt(run_id="run-of-mlflow", next_byte=0)}
    write_shipped(ledger, Shipped(attempts=shipped))


def test_newest_come_first_with_their_mlflow_run(home):
    record(home, "a-1", "a", "rows", "sft")
    runs = stage_runs(recipe=None, stage=None, limit=20, unreadable=[])
    assert [(run.stage, run.number, run.outcome) for run in runs] == [
        ("sft", 2, None),
        ("sft", 1, "failed"),
        ("rows", 2, "finished"),
        ("rows", 1, "failed"),
    ]
    assert [run.mlflow_run_id for run in runs] == [None, None, None, "run-of-mlflow"]
    text = as_text(runs).splitlines()
    assert "running" in text[0]
    assert "rows 12,345" in text[2]
    assert "run-of-mlflow" in text[3]


def test_they_are_chosen_by_recipe_and_by_stage(home):
    record(home, "a-1", "a", "rows", "sft")
    record(home, "b-1", "b", "rows", "rows-2")
    assert {run.recipe for run in stage_runs(recipe="b", stage=None, limit=20, unreadable=[])} == {"b"}
    assert {run.stage for run in stage_runs(recipe=None, stage="rows", limit=20, unreadable=[])} == {"rows"}
    assert len(stage_runs(recipe=None, stage=None, limit=3, unreadable=[])) == 3
    assert as_text(stage_runs(recipe="c", stage=None, limit=20, unreadable=[])) == "no stage has been run here yet"


def test_what_runs_on_another_host_is_unknown(home):
    other = ProcessIdentity.own().model_copy(update={"boot": "another", "host": "other"})
    record(home, "a-1", "a", "rows", process=other)
    (last, first) = as_text(stage_runs(recipe=None, stage=None, limit=20, unreadable=[])).splitlines()
    assert "unknown, on other" in last and "failed" in first


def test_refreshes_that_cannot_be_listed_are_counted_with_where_they_lie(home):
    assert not_listed([]) == []
    record(home, "a-1", "a", "rows")
    record(home, "b-1", "b", "rows")
    with (home / "ledger" / "b-1" / "ledger.jsonl").open("a") as stream:
        stream.write('{"event": "of another version"}\n')
    for name in ("c-1", "c-2"):
        (home / "refreshes" / name).mkdir(parents=True)
    unreadable = []
    runs = stage_runs(recipe=None, stage=None, limit=20, unreadable=unreadable)
    assert {run.refresh for run in runs} == {"a-1"}
    earlier, damaged = not_listed(unreadable)
    assert f"refreshes of an earlier version (2), in {home / 'refreshes'}" in earlier
    assert "refreshes whose ledgers cannot be read (1: b-1)" in damaged
