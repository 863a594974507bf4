"""Refreshes are recorded in a real MLflow (on SQLite) completely and exactly once, even if processes die."""

import json

import pytest

from flows.ledger.events import (
    AttemptBegan,
    CompareBegan,
    LayoutEntry,
    LayoutMeasured,
    RefreshEnded,
    TrialEnded,
)
from flows.ledger.refreshes import Ledger, end_of
from flows.tracking.cursor import read_shipped, write_shipped
from flows.tracking.shipper import EXPERIMENT, Shipper
from tests.beginnings import beginning


@pytest.fixture(scope="module")
def client(tmp_path_factory):
    from mlflow import MlflowClient

    folder = tmp_path_factory.mktemp("mlflow")
    client = MlflowClient(f"sqlite:///{folder}/mlflow.db")
    client.create_experiment(EXPERIMENT, artifact_location=str(folder / "artifacts"))
    return client


@pytest.fixture
def ledger(tmp_path):
    ledger = Ledger(tmp_path / "ledger" / tmp_path.name)
    ledger.append(beginning(tmp_path, {"sft": "train"}, tmp_path.name, "tiny", time_ms=1))
    return ledger


@pytest.fixture
def work(tmp_path):
    work = tmp_path / "work"
    work.mkdir()
    return work


def begin(ledger, work, number=1, first_byte=0):
    tags = {"kind": "train", "stage": "sft", "version": "0123456789ab"}
    attempt = AttemptBegan(
        stage="sft",
        number=number,
        work=work,
        time_ms=number,
        first_byte=first_byte,
        params={"steps": "3"},
        tags=tags,
    )
    ledger.append(attempt)
    return ledger.read().attempts[f"sft-{number}"]


def log(work, *steps, name="loss"):
    with (work / "metrics.jsonl").open("a") as stream:
        for step in steps:
            stream.write(json.dumps({"step": step, "time_ms": 1000 + step, name: float(step)}) + "\n")


def close(ledger, state="completed"):
    ledger.append(RefreshEnded(state=state, seconds=1.0))


def logged(client, ledger, number=1, name="loss"):
    run = read_shipped(ledger).attempts[f"sft-{number}"].run_id
    return [metric.step for metric in client.get_metric_history(run, name)]


def test_steps_are_shipped_as_they_come_and_once(client, ledger, work):
    begin(ledger, work)
    shipper = Shipper(ledger, client)
    log(work, 1, 2)
    assert not shipper.ship()
    log(work, 3)
    shipper.ship()
    shipper.ship()
    assert logged(client, ledger) == [1, 2, 3]


def test_a_torn_line_waits_for_its_end(client, ledger, work):
    begin(ledger, work)
    (work / "metrics.jsonl").write_text('{"step": 1, "time_ms": 1, "lo')
    shipper = Shipper(ledger, client)
    shipper.ship()
    with (work / "metrics.jsonl").open("a") as stream:
        stream.write('ss": 0.5}\n')
    shipper.ship()
    assert logged(client, ledger) == [1]


def test_a_second_attempt_ships_only_the_steps_that_the_first_had_not_logged(client, ledger, work):
    first = begin(ledger, work)
    log(work, 1, 2, 3)
    ledger.append(end_of(first, "failed", error="killed"))
    begin(ledger, work, number=2, first_byte=(work / "metrics.jsonl").stat().st_size)
    log(work, 2, 3, 4)
    log(work, 3, name="evaluation_loss")
    Shipper(ledger, client).ship()
    assert logged(client, ledger, 1) == [1, 2, 3]
    assert logged(client, ledger, 2) == [4]
    assert logged(client, ledger, 2, "evaluation_loss") == [3]


def test_a_shipper_that_died_before_it_could_note_its_progress_repeats_nothing(client, ledger, work):
    begin(ledger, work)
    log(work, 1, 2)
    shipper = Shipper(ledger, client)
    shipper.ship()
    shipped = read_shipped(ledger)
    forgotten = {key: one.model_copy(update={"next_byte": 0}) for key, one in shipped.attempts.items()}
    write_shipped(ledger, shipped.model_copy(update={"attempts": forgotten}))
    Shipper(ledger, client).ship()
    assert logged(client, ledger) == [1, 2]


def test_runs_that_were_created_but_not_noted_are_found_again(client, ledger, work):
    begin(ledger, work)
    Shipper(ledger, client).ship()
    known = read_shipped(ledger)
    write_shipped(ledger, known.model_copy(update={"parent_run_id": None, "attempts": {}}))
    Shipper(ledger, client).ship()
    assert read_shipped(ledger).parent_run_id == known.parent_run_id
    assert read_shipped(ledger).attempts == known.attempts


def test_the_end_brings_status_figures_files_and_a_note(client, ledger, work):
    attempt = begin(ledger, work)
    (work / "plots").mkdir()
    (work / "plots" / "loss.png").write_bytes(b"png")
    (work / "report.json").write_text("{}")
    said = {"metrics": {"loss": 0.25}, "tags": {"layout": "one"}, "files": ("report.json",)}
    ledger.append(end_of(attempt, "finished", **said))
    close(ledger)
    assert Shipper(ledger, client).ship()
    shipped = read_shipped(ledger)
    run = client.get_run(shipped.attempts["sft-1"].run_id)
    assert (run.info.status, run.data.metrics["loss"], run.data.params["steps"]) == ("FINISHED", 0.25, "3")
    assert run.data.tags["mlflow.parentRunId"] == shipped.parent_run_id
    assert run.data.tags["layout"] == "one"
    assert [file.path for file in client.list_artifacts(run.info.run_id)] == ["plots", "report.json"]
    assert "sft" in client.get_run(shipped.parent_run_id).data.tags["mlflow.note.content"]


def test_completions_are_a_table_that_mlflow_reads_as_its_own(client, ledger, work, monkeypatch):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", client.tracking_uri)  # which load_table asks
    attempt = begin(ledger, work)
    lines = [{"step": step, "text": f"{step} + 1 = 2", "rewards": {"right": float(step == 1)}} for step in range(2500)]
    text = "".join(json.dumps(line) + "\n" for line in lines)
    (work / "completions.jsonl").write_text(text + '{"step": 2500, "te')
    ledger.append(end_of(attempt, "finished", files=("completions.jsonl",)))
    close(ledger)
    for _ in range(2):  # the second time as after a crash: nothing is there twice
        assert Shipper(ledger, client).ship()
        write_shipped(ledger, read_shipped(ledger).model_copy(update={"attempts": {}, "done": False}))
    Shipper(ledger, client).ship()
    shipped = read_shipped(ledger)
    run = shipped.attempts["sft-1"].run_id
    table = client.load_table(shipped.experiment_id, "completions.table.json", run_ids=[run])
    assert table["step"].tolist() == list(range(0, 2500, 3))
    assert table["text"].tolist() == [lines[step]["text"] for step in table["step"]]
    assert table["rewards.right"].tolist() == [lines[step]["rewards"]["right"] for step in table["step"]]


def test_trouble_is_noted_and_gone_after_the_next_success(client, ledger, work):
    begin(ledger, work)
    shipper = Shipper(ledger, client)
    shipper.note_trouble(ConnectionError("refused"))
    assert read_shipped(ledger).trouble == "ConnectionError: refused"
    shipper.ship()
    assert read_shipped(ledger).trouble is None


@pytest.fixture
def compared(ledger, work):
    """Provide the ledger (event log) of a finished comparison of two layouts: one measured, one rejected."""
    entry = {"engine": "fsdp", "num_devices": 1, "global_batch_size": 4, "params": {"engine": "fsdp"}, "tags": {}}
    texts = {"fsdp dp_shard=1": None, "fsdp dp_shard=3": "4 rows are not divisible by 3"}
    layouts = tuple(LayoutEntry(text=text, refused=refused, **entry) for text, refused in texts.items())
    ledger.append(CompareBegan(stage="sft", num_steps=2, num_warmup_steps=1, num_rounds=2, layouts=layouts))
    log(work, 1, 2, 3)
    for number in (1, 2):
        ledger.append(TrialEnded(layout=0, round=number, work=work, seconds=1.0, tags={"device": "cpu"}))
    ledger.append(LayoutMeasured(layout=0, metrics={"loss": 0.5, "step_time_s": 2.0}, error=None))
    ledger.append(LayoutMeasured(layout=1, metrics={}, error="4 rows are not divisible by 3"))
    ledger.append(RefreshEnded(state="completed", seconds=9.0))
    (ledger.folder / "report.html").write_text("<p>")
    (ledger.folder / "note.md").write_text("| layout |")
    return ledger


def test_a_comparison_is_a_run_a_layout_under_one_parent(client, compared):
    assert Shipper(compared, client).ship()
    shipped = read_shipped(compared)
    first, second = (client.get_run(shipped.attempts[f"layouts/{number}"].run_id) for number in (0, 1))
    assert (first.info.status, first.data.metrics) == ("FINISHED", {"loss": 0.5, "step_time_s": 2.0})
    history = client.get_metric_history(first.info.run_id, "loss")
    assert sorted(metric.step for metric in history) == [1, 2, 3, 4, 5, 6, 6]
    assert (first.data.params["measured_rounds"], first.data.tags["device"]) == ("2", "cpu")
    assert (second.info.status, second.data.tags["error"]) == ("FAILED", "4 rows are not divisible by 3")
    parent = client.get_run(shipped.parent_run_id)
    assert {run.data.tags["mlflow.parentRunId"] for run in (first, second)} == {parent.info.run_id}
    assert {run.data.tags["comparison"] for run in (first, second, parent)} == {compared.folder.name}
    assert parent.data.tags["mlflow.note.content"].startswith("| layout |")
    assert [file.path for file in client.list_artifacts(parent.info.run_id)] == ["report.html"]


def test_layouts_whose_runs_were_not_noted_are_found_again(client, compared):
    Shipper(compared, client).ship()
    known = read_shipped(compared)
    write_shipped(compared, known.model_copy(update={"attempts": {}, "done": False}))
    Shipper(compared, client).ship()
    assert read_shipped(compared) == known
    history = client.get_metric_history(known.attempts["layouts/0"].run_id, "loss")
    assert sorted(metric.step for metric in history) == [1, 2, 3, 4, 5, 6, 6]


def test_a_retry_opens_the_run_of_the_refresh_again(client, ledger, work):
    attempt = begin(ledger, work)
    ledger.append(end_of(attempt, "failed", error="no memory"))
    close(ledger, "failed")
    Shipper(ledger, client).ship()
    parent = read_shipped(ledger).parent_run_id
    assert client.get_run(parent).info.status == "FAILED"
    ledger.append(next(ledger.events()))
    assert not Shipper(ledger, client).ship()
    assert client.get_run(parent).info.status == "RUNNING"
    close(ledger)
    assert Shipper(ledger, client).ship()
    assert (read_shipped(ledger).parent_run_id, client.get_run(parent).info.status) == (parent, "FINISHED")
