"""Stage runs as `lifecycle runs` lists them, from records."""

import pytest

from flows.cli.runs import as_text, stage_runs
from flows.ledger.history import AttemptRecord, RefreshRecord, Shipped, ShippedAttempt, end_attempt, folder_of
from flows.ledger.process_identity import ProcessIdentity


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("LIFECYCLE_HOME", str(tmp_path))
    return tmp_path


def record(home, refresh, recipe, *stages):
    """A refresh whose stages each failed once and then worked, but for the last, which runs."""
    folder = folder_of(refresh)
    folder.write(
        RefreshRecord(
            refresh=refresh,
            recipe=recipe,
            recipe_path=home / "recipe.yaml",
            started_ms=1,
            process=ProcessIdentity.own(),
            hardware="1 × abacus",
            git_commit=None,
            stages={},
        )
    )
    for position, stage in enumerate(stages):
        tags = {"recipe": recipe, "kind": "download", "version": "0123456789ab"}
        for number in (1, 2):
            started_ms = 10 * position + number
            first = AttemptRecord(
                stage=stage, number=number, work=home, started_ms=started_ms, first_byte=0, params={}, tags=tags
            )
            ended = end_attempt(first, "finished" if number == 2 else "failed", metrics={"rows": 12345.0})
            folder.write_attempt(first if (stage, number) == (stages[-1], 2) else ended)
    folder.write_shipped(Shipped(attempts={f"{stages[0]}-1": ShippedAttempt(run_id="run-of-mlflow", next_byte=0)}))


def test_newest_come_first_with_their_mlflow_run(home):
    record(home, "a-1", "a", "rows", "sft")
    runs = stage_runs(recipe=None, stage=None, limit=20)
    assert [(run.stage, run.number, run.outcome) for run in runs] == [
        ("sft", 2, None),
        ("sft", 1, "failed"),
        ("rows", 2, "finished"),
        ("rows", 1, "failed"),
    ]
    assert [run.mlflow_run_id for run in runs] == [None, None, None, "run-of-mlflow"]
    text = as_text(runs).splitlines()
    assert "running" in text[0]
    assert "rows 12,345" in text[1]
    assert "run-of-mlflow" in text[3]


def test_they_are_chosen_by_recipe_and_by_stage(home):
    record(home, "a-1", "a", "rows", "sft")
    record(home, "b-1", "b", "rows", "rows-2")
    assert {run.recipe for run in stage_runs(recipe="b", stage=None, limit=20)} == {"b"}
    assert {run.stage for run in stage_runs(recipe=None, stage="rows", limit=20)} == {"rows"}
    assert len(stage_runs(recipe=None, stage=None, limit=3)) == 3
    assert as_text(stage_runs(recipe="c", stage=None, limit=20)) == "no stage has been run here yet"
