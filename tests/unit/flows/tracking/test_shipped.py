"""What MLflow itself has of a refresh that was shipped: whole curves, and pages that open on the runs."""

import json

import pytest

from flows.ledger.events import AttemptBegan, PlannedEntry, RefreshBegan, RefreshEnded
from flows.ledger.process_identity import ProcessIdentity
from flows.ledger.refreshes import Ledger, end_of, ledger_of
from tests.promotion import own_mlflow

NUM_STEPS = 10


@pytest.fixture
def client(tmp_path, monkeypatch):
    from mlflow import MlflowClient

    for name, value in own_mlflow(tmp_path).items():
        monkeypatch.setenv(name, value)
    return MlflowClient()


def resumed(work) -> Ledger:
    """A stage that was stopped after its fourth step, and went on."""
    work.mkdir()
    ledger = ledger_of("nightly-1")
    ledger.append(
        RefreshBegan(
            refresh="nightly-1",
            recipe="nightly",
            recipe_path=work / "recipe.yaml",
            process=ProcessIdentity.own(),
            hardware="1 × abacus",
            git_commit=None,
            stages={"sft": PlannedEntry(kind="train", version="0123456789ab")},
        )
    )
    tags = {"recipe": "nightly", "kind": "train", "version": "0123456789ab"}
    file = work / "metrics.jsonl"
    for number, steps in ((1, range(4)), (2, range(4, NUM_STEPS))):
        first_byte = file.stat().st_size if file.exists() else 0
        begins = AttemptBegan(stage="sft", number=number, work=work, first_byte=first_byte, params={}, tags=tags)
        ledger.append(begins)
        with file.open("a") as stream:
            for step in steps:
                stream.write(json.dumps({"step": step, "time_ms": 1000 + step, "loss": 9.0 - step, "mfu": 0.4}) + "\n")
        begun = ledger.read().attempts[f"sft-{number}"]
        last = number == 2
        metrics = {"loss": 0.0, "evaluation_loss": 0.5} if last else {}
        ledger.append(end_of(begun, "finished" if last else "killed", metrics=metrics))
    ledger.append(RefreshEnded(state="completed", seconds=3.0))
    return ledger


def history(client, run_id: str, metric: str) -> list[tuple[int, float]]:
    return sorted((point.step, point.value) for point in client.get_metric_history(run_id, metric))


def test_the_run_of_a_refresh_has_the_whole_curve_of_a_stage_that_was_resumed(tmp_path, client):
    from flows.tracking.shipper import Shipper

    ledger = resumed(tmp_path / "work")
    shipper = Shipper(ledger, client)
    assert shipper.ship()

    attempts = [shipper.shipped.attempts[name].run_id for name in ("sft-1", "sft-2")]
    assert [len(history(client, run, "loss")) for run in attempts] == [4, NUM_STEPS - 4]
    parent = shipper.shipped.parent_run_id
    assert parent
    assert sorted(set(history(client, parent, "sft.loss"))) == [(step, 9.0 - step) for step in range(9)] + [(9, 0.0)]
    assert history(client, parent, "sft.evaluation_loss") == [(9, 0.5)]
    assert history(client, parent, "sft.mfu") == []


def test_the_experiment_opens_on_its_runs(tmp_path, client):
    from flows.tracking.shipper import EXPERIMENT, experiment_id

    assert [experiment_id(client), experiment_id(client)] == [
        client.get_experiment_by_name(EXPERIMENT).experiment_id
    ] * 2
    assert client.get_experiment_by_name(EXPERIMENT).tags["mlflow.experimentKind"] == "custom_model_development"
