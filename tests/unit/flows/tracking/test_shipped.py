"""A pipeline run sent to MLflow has complete metric curves, and links that open its MLflow runs."""

import json
import re
from pathlib import Path
from urllib.parse import parse_qs

import pytest

from flows.ledger.events import AttemptBegan, RefreshEnded
from flows.ledger.refreshes import Ledger, end_of, ledger_of
from flows.servers.guard import LOGIN_PAGE
from tests.beginnings import beginning
from tests.promotion import own_mlflow

NUM_STEPS = 10


@pytest.fixture
def client(tmp_path, monkeypatch):
    from mlflow import MlflowClient

    for name, value in own_mlflow(tmp_path).items():
        monkeypatch.setenv(name, value)
    return MlflowClient()


def began(work, stages) -> Ledger:
    ledger = ledger_of("nightly-1")
    ledger.append(beginning(work, stages))
    return ledger


def resumed(work) -> Ledger:
    """Write the event log (ledger) of a train stage that was stopped after its fourth step, and resumed."""
    work.mkdir()
    ledger = began(work, {"sft": "train"})
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


def test_the_experiment_has_a_view_of_its_runs_which_a_person_may_change(client):
    """MLflow's experiment has a saved view with our columns, which users may change; a browser showed how it looks."""
    import mlflow

    from flows.tracking.pages import RUNS_LINK
    from flows.tracking.shipper import EXPERIMENT, experiment_id

    identity = experiment_id(client)
    tags = client.get_experiment_by_name(EXPERIMENT).tags
    assert tags["mlflow.experimentKind"] == "custom_model_development"
    key = parse_qs(RUNS_LINK.partition("?")[2])["viewStateShareKey"][0]
    view = json.loads(tags[f"mlflow.sharedViewState.{key}"])
    assert {"name", "createdAt", "updatedAt"} <= view.keys()
    columns = json.loads(view["state"])["selectedColumns"]
    assert {"tags.`recipe`", "tags.`stage`", "tags.`layout`", "metrics.`real_tokens_per_s`", "metrics.`mfu`"} < {
        *columns
    }
    pages = "".join(
        path.read_text() for path in Path(mlflow.__file__).parent.glob("server/js/build/static/js/main.*.js")
    )
    for asked in ("viewStateShareKey", "mlflow.sharedViewState.", "mlflow.workflowType", "machine_learning"):
        assert asked in pages
    stored = re.findall(r'localStorage.setItem\("(mlflow\.[^"]*)_v1"', LOGIN_PAGE)
    assert len(stored) == 2 and all(f'key:"{name}",version:1' in pages for name in stored)

    client.set_experiment_tag(identity, f"mlflow.sharedViewState.{key}", "a person's")
    assert experiment_id(client) == identity
    assert client.get_experiment_by_name(EXPERIMENT).tags[f"mlflow.sharedViewState.{key}"] == "a person's"


def test_scores_are_a_column_of_evaluations_and_of_their_refresh(tmp_path, client):
    from flows.tracking.shipper import Shipper

    ledger = began(tmp_path, {"sft": "train", "evaluate": "evaluate"})
    metrics = {"sums.exact_match": 0.98765, "sums.exact_match_stderr": 0.01}
    for stage, kind in (("sft", "train"), ("evaluate", "evaluate")):
        tags = {"recipe": "nightly", "kind": kind, "version": "0123456789ab"}
        ledger.append(AttemptBegan(stage=stage, number=1, work=tmp_path, first_byte=0, params={}, tags=tags))
        attempt = ledger.read().attempts[f"{stage}-1"]
        ledger.append(end_of(attempt, "finished", seconds=1.0, metrics=metrics))
    ledger.append(RefreshEnded(state="completed", seconds=3.0))
    shipper = Shipper(ledger, client)
    assert shipper.ship()

    runs = {name: client.get_run(attempt.run_id).data.tags for name, attempt in shipper.shipped.attempts.items()}
    assert "scores" not in runs["sft-1"]
    assert runs["evaluate-1"]["scores"] == "sums.exact_match 0.9877"
    assert runs["evaluate-1"]["mlflow.runType"] == "evaluation"  # which unfolds the refresh in the list of runs
    assert "mlflow.runType" not in runs["sft-1"]
    assert client.get_run(shipper.shipped.parent_run_id).data.tags["scores"] == "evaluate: sums.exact_match 0.9877"
