"""What is shipped to MLflow: everything, once, whatever dies in between. A real MLflow on sqlite."""

import json

import pytest

from flows.ledger.history import AttemptRecord, RefreshFolder, RefreshRecord, StageEntry, end_attempt
from flows.ledger.process_identity import ProcessIdentity
from flows.tracking.shipper import EXPERIMENT, Shipper


@pytest.fixture(scope="module")
def client(tmp_path_factory):
    from mlflow import MlflowClient

    folder = tmp_path_factory.mktemp("mlflow")
    client = MlflowClient(f"sqlite:///{folder}/mlflow.db")
    client.create_experiment(EXPERIMENT, artifact_location=str(folder / "artifacts"))
    return client


@pytest.fixture
def folder(tmp_path):
    folder = RefreshFolder(tmp_path / "refreshes" / tmp_path.name)
    folder.write(
        RefreshRecord(
            refresh=tmp_path.name,
            recipe="tiny",
            recipe_path=tmp_path / "tiny.yaml",
            started_ms=1,
            process=ProcessIdentity.own(),
            hardware="1 × abacus",
            git_commit=None,
            stages={"sft": StageEntry(kind="train", version="0123456789ab")},
        )
    )
    return folder


@pytest.fixture
def work(tmp_path):
    work = tmp_path / "work"
    work.mkdir()
    return work


def begin(folder, work, number=1, first_byte=0):
    tags = {"kind": "train", "stage": "sft", "version": "0123456789ab"}
    attempt = AttemptRecord(
        stage="sft",
        number=number,
        work=work,
        started_ms=number,
        first_byte=first_byte,
        params={"steps": "3"},
        tags=tags,
    )
    folder.write_attempt(attempt)
    return attempt


def log(work, *steps, name="loss"):
    with (work / "metrics.jsonl").open("a") as stream:
        for step in steps:
            stream.write(json.dumps({"step": step, "time_ms": 1000 + step, name: float(step)}) + "\n")


def close(folder, state="completed"):
    folder.write(folder.read().model_copy(update={"state": state}))


def logged(client, folder, number=1, name="loss"):
    run = folder.read_shipped().attempts[f"sft-{number}"].run_id
    return [metric.step for metric in client.get_metric_history(run, name)]


def test_steps_are_shipped_as_they_come_and_once(client, folder, work):
    begin(folder, work)
    shipper = Shipper(folder, client)
    log(work, 1, 2)
    assert not shipper.ship()
    log(work, 3)
    shipper.ship()
    shipper.ship()
    assert logged(client, folder) == [1, 2, 3]


def test_a_torn_line_waits_for_its_end(client, folder, work):
    begin(folder, work)
    (work / "metrics.jsonl").write_text('{"step": 1, "time_ms": 1, "lo')
    shipper = Shipper(folder, client)
    shipper.ship()
    with (work / "metrics.jsonl").open("a") as stream:
        stream.write('ss": 0.5}\n')
    shipper.ship()
    assert logged(client, folder) == [1]


def test_a_second_attempt_ships_only_the_steps_that_the_first_had_not_logged(client, folder, work):
    first = begin(folder, work)
    log(work, 1, 2, 3)
    folder.write_attempt(end_attempt(first, "failed", error="killed"))
    begin(folder, work, number=2, first_byte=(work / "metrics.jsonl").stat().st_size)
    log(work, 2, 3, 4)
    log(work, 3, name="evaluation_loss")
    Shipper(folder, client).ship()
    assert logged(client, folder, 1) == [1, 2, 3]
    assert logged(client, folder, 2) == [4]
    assert logged(client, folder, 2, "evaluation_loss") == [3]


def test_a_shipper_that_died_before_it_could_note_its_progress_repeats_nothing(client, folder, work):
    begin(folder, work)
    log(work, 1, 2)
    shipper = Shipper(folder, client)
    shipper.ship()
    shipped = folder.read_shipped()
    forgotten = {key: one.model_copy(update={"next_byte": 0}) for key, one in shipped.attempts.items()}
    folder.write_shipped(shipped.model_copy(update={"attempts": forgotten}))
    Shipper(folder, client).ship()
    assert logged(client, folder) == [1, 2]


def test_runs_that_were_created_but_not_noted_are_found_again(client, folder, work):
    begin(folder, work)
    Shipper(folder, client).ship()
    known = folder.read_shipped()
    folder.write_shipped(known.model_copy(update={"parent_run_id": None, "attempts": {}}))
    Shipper(folder, client).ship()
    assert folder.read_shipped().parent_run_id == known.parent_run_id
    assert folder.read_shipped().attempts == known.attempts


def test_the_end_brings_status_figures_files_and_a_note(client, folder, work):
    attempt = begin(folder, work)
    (work / "plots").mkdir()
    (work / "plots" / "loss.png").write_bytes(b"png")
    (work / "report.json").write_text("{}")
    ended = end_attempt(attempt, "finished", metrics={"loss": 0.25}, tags={"layout": "one"}, files=("report.json",))
    folder.write_attempt(ended)
    close(folder)
    assert Shipper(folder, client).ship()
    shipped = folder.read_shipped()
    run = client.get_run(shipped.attempts["sft-1"].run_id)
    assert (run.info.status, run.data.metrics["loss"], run.data.params["steps"]) == ("FINISHED", 0.25, "3")
    assert run.data.tags["mlflow.parentRunId"] == shipped.parent_run_id
    assert run.data.tags["layout"] == "one"
    assert [file.path for file in client.list_artifacts(run.info.run_id)] == ["plots", "report.json"]
    assert "sft" in client.get_run(shipped.parent_run_id).data.tags["mlflow.note.content"]


def test_trouble_is_noted_and_gone_after_the_next_success(client, folder, work):
    begin(folder, work)
    shipper = Shipper(folder, client)
    shipper.note_trouble(ConnectionError("refused"))
    assert folder.read_shipped().trouble == "ConnectionError: refused"
    shipper.ship()
    assert folder.read_shipped().trouble is None
