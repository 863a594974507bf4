"""Training runs and evaluations have their datasets as inputs in a real MLflow."""

import json

import pytest

from flows.ledger.events import AttemptBegan
from flows.ledger.home import store_root
from flows.ledger.refreshes import end_of
from flows.store.store import Store
from flows.tracking.shipper import Shipper
from tests.promotion import own_mlflow, write_evaluation
from tests.unit.flows.tracking.test_shipped import began


@pytest.fixture
def client(tmp_path, monkeypatch):
    from mlflow import MlflowClient

    for name, value in own_mlflow(tmp_path).items():
        monkeypatch.setenv(name, value)
    return MlflowClient()


@pytest.fixture
def rows(make_plan, recipe, tmp_path, monkeypatch):
    """Provide the record of a stored dataset artifact with two training shards and held-out rows."""
    from tests.unit.flows.conftest import commit_stage

    monkeypatch.setenv("LIFECYCLE_HOME", str(tmp_path / "home"))
    planned = make_plan(recipe()).stages["problems"]
    artifact = commit_stage(Store(store_root()), planned, {}, "none")
    (artifact.folder / "data" / "content").unlink()
    for name, num_rows in {"train-00000-of-00002": 30, "train-00001-of-00002": 20, "test": 7}.items():
        lines = [json.dumps({"text": "x", "id": number, "meta": []}) for number in range(num_rows)]
        (artifact.folder / "data" / f"{name}.jsonl").write_text("\n".join(lines))
    tags = {"source": "hf://datasets/org/sums@main", "revision": "a" * 40}
    record = artifact.record.model_copy(update={"tags": tags, "files": {}})
    (artifact.folder / "record.json").write_text(record.model_dump_json())
    return record


def shipped_inputs(client, work, tags, params, outcome=None):
    ledger = began(work, {"sft": "train"})
    ledger.append(AttemptBegan(stage="sft", number=1, work=work, first_byte=0, params=params, tags=tags))
    if outcome:
        ledger.append(end_of(ledger.read().attempts["sft-1"], outcome))
    shipper = Shipper(ledger, client)
    shipper.ship()
    run = client.get_run(shipper.shipped.attempts["sft-1"].run_id)
    return {one.tags[0].value: one.dataset for one in run.inputs.dataset_inputs}, ledger


def test_a_training_run_has_its_splits_with_source_digest_rows_and_columns(client, rows, tmp_path):
    from mlflow.types import Schema

    tags = {"recipe": "nightly", "kind": "train", "version": "0" * 12, "upstream.data.dataset": rows.version}
    params = {"data.split": "train", "data.evaluation_split": "test"}
    (tmp_path / "work").mkdir()
    inputs, ledger = shipped_inputs(client, tmp_path / "work", tags, params)
    assert {context: one.name for context, one in inputs.items()} == {
        "training": "problems/train",
        "evaluation": "problems/test",
    }
    training = inputs["training"]
    assert (training.source_type, json.loads(training.source)) == (
        "hugging_face",
        {"path": "org/sums", "revision": "a" * 40},
    )
    assert training.digest == rows.digest[:36]
    assert json.loads(training.profile)["num_rows"] == 50
    assert json.loads(training.profile)["num_files"] == 2
    assert json.loads(inputs["evaluation"].profile)["num_rows"] == 7
    columns = json.loads(training.schema)["mlflow_colspec"]
    assert Schema.from_json(json.dumps(columns)).input_names() == ["text", "id", "meta"]
    # After a crash that noted nothing, the same is shipped again, and is there once.
    (ledger.folder / "mlflow.json").unlink()
    again = Shipper(ledger, client)
    again.note_trouble(RuntimeError("killed"))
    again.ship()
    run = client.get_run(again.shipped.attempts["sft-1"].run_id)
    assert len(run.inputs.dataset_inputs) == 2


def test_an_evaluation_has_its_tasks_with_the_samples_that_were_asked(client, tmp_path, monkeypatch):
    monkeypatch.setenv("LIFECYCLE_HOME", str(tmp_path / "home"))
    work = tmp_path / "work"
    work.mkdir()
    write_evaluation(work, [1, 0, 1])
    scores = json.loads((work / "scores.json").read_text())
    scores |= {"n-samples": {"sums": {"original": 40, "effective": 3}}}
    scores["configs"]["sums"]["dataset_path"] = "org/sums"
    (work / "scores.json").write_text(json.dumps(scores))
    tags = {"recipe": "nightly", "kind": "evaluate", "version": "0" * 12, "upstream.model": "1" * 12}
    inputs, _ = shipped_inputs(client, work, tags, {"tasks": "sums"}, "finished")
    found = inputs["evaluation"]
    assert (found.name, found.source_type) == ("sums", "lm_eval")
    assert json.loads(found.profile) == {"num_rows": 40, "num_asked": 3}
    assert json.loads(found.source)["uri"] == "org/sums"


def test_data_that_are_not_there_or_of_no_split_are_left_out(client, rows, tmp_path):
    (tmp_path / "work").mkdir()
    tags = {"kind": "train", "version": "0" * 12, "upstream.a.dataset": rows.version, "upstream.b.dataset": "f" * 12}
    params = {"a.split": "nowhere", "b.split": "train"}
    assert shipped_inputs(client, tmp_path / "work", {**tags, "recipe": "x"}, params)[0] == {}
