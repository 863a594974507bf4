"""A pipeline run sent to MLflow has complete metric curves, and links that open its MLflow runs."""

import importlib.util
import json
import os
import re
import time
from pathlib import Path
from urllib.parse import parse_qs

import pytest

from flows.ledger.events import AttemptBegan, RefreshEnded
from flows.ledger.refreshes import Ledger, end_of, ledger_of
from flows.servers.guard import LOGIN_PAGE
from flows.tracking import copies, shipper
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


class Lines:
    """Tracker whose run is a file with a value a line; a process that finds BROKEN cannot write beyond three values."""

    def __init__(self, folder, refresh, name, config):
        self.file = (folder / "values.jsonl").open("x")
        self.is_broken = "BROKEN" in os.environ

    def log(self, rows):
        for number, row in enumerate(rows):
            if self.is_broken and row.step + number > 2:
                raise OSError(28, "No space left on device")
            self.file.write(json.dumps([row.name, row.step, row.value]) + "\n")

    def finish(self):
        self.file.close()


def test_another_tracker_has_each_value_of_the_ledger_once_also_after_it_was_full(tmp_path, monkeypatch):
    """The oracle is `metrics.jsonl` itself, of which the second attempt is a resumed one."""
    monkeypatch.setenv("LIFECYCLE_HOME", str(tmp_path / "home"))
    monkeypatch.setitem(copies.WRITERS, "lines", Lines)
    ledger = resumed(tmp_path / "work")
    with monkeypatch.context() as full:
        full.setenv("BROKEN", "1")
        copier = copies.Copier(ledger, "lines")
        with pytest.raises(OSError, match="No space left"):
            copier.copy()
    assert copies.Copied.read_or_none(copies.copied_file(ledger.folder, "lines")) is None
    for _ in range(2):  # the second finds nothing to do
        copies.Copier(ledger, "lines").copy()
    runs = sorted((tmp_path / "home" / "trackers" / "lines" / "nightly-1").glob("*/values.jsonl"))
    assert [run.parent.name for run in runs] == ["sft-1", "sft-2"]
    copied = [json.loads(line) for run in runs for line in run.read_text().splitlines()]
    logged = [json.loads(line) for line in (tmp_path / "work" / "metrics.jsonl").read_text().splitlines()]
    expected = [[name, row["step"], row[name]] for row in logged for name in ("loss", "mfu")]
    assert copied[: len(expected)] == expected
    assert {name for name, _, _ in copied[len(expected) :]} == {"evaluation_loss", "stage_time_s"}


@pytest.mark.nightly
@pytest.mark.parametrize("asked", ["tensorboard", "wandb", "swanlab", "mirror, wandb"])
def test_trackers_get_the_whole_curve_and_never_hold_a_refresh_up(tmp_path, monkeypatch, capfd, asked):
    for name, value in own_mlflow(tmp_path).items():
        if name != "PYTHONPATH":  # which may say where the trackers are
            monkeypatch.setenv(name, value)
    for name, value in {"WANDB_MODE": "offline", "SWANLAB_MODE": "offline", shipper.OTHERS_VARIABLE: asked}.items():
        monkeypatch.setenv(name, value)
    if "," in asked:  # the one does not exist, the other hangs
        (tmp_path / "wandb.py").write_text("import time\ntime.sleep(600)\n")
        monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    ledger = resumed(tmp_path / "work")
    tracker = shipper.Tracker(ledger)
    tracker.start({})
    began_s = time.monotonic()
    tracker.close()
    assert time.monotonic() - began_s < shipper.CLOSE_TIMEOUT_S + 2 * shipper.OTHERS_TIMEOUT_S
    said = capfd.readouterr().err
    if "," in asked:
        assert "mirror lacks a part of this refresh, and gets it with the next: ValueError: there is no tracker" in said
        assert "wandb lacks a part of this refresh, and gets it with the next: it did not finish in 10 s" in said
        return
    assert importlib.util.find_spec(asked), f"{asked} is not installed; `make trackers` does it"
    assert "warning" not in said
    runs = tmp_path / "home" / "trackers" / asked / "nightly-1"
    found = {"tensorboard": of_tensorboard, "wandb": of_wandb, "swanlab": of_swanlab}[asked](runs)
    assert found == [(step, 9.0 - step) for step in range(NUM_STEPS)]


def of_tensorboard(runs):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    points = []
    for run in sorted(runs.iterdir()):
        read = EventAccumulator(str(run), size_guidance={"scalars": 0}).Reload()
        points += [(one.step, one.value) for one in read.Scalars("loss")]
    return points


def of_wandb(runs):
    from wandb.proto.wandb_internal_pb2 import Record

    points = []
    for file in sorted(runs.rglob("*.wandb")):
        data, position = file.read_bytes(), 7
        assert len(data) < 32768, "one block of LevelDB's log"
        while position < len(data):
            size = int.from_bytes(data[position + 4 : position + 6], "little")
            record = Record()
            record.ParseFromString(data[position + 7 : position + 7 + size])
            row = {item.nested_key[0]: json.loads(item.value_json) for item in record.history.item}
            points += [(row["_step"], row["loss"])] if "loss" in row else []
            position += 7 + size
    return points


def of_swanlab(runs):
    from swanlab.log.backup.datastore import DataStore

    points = []
    for file in sorted(runs.rglob("*.swanlab")):
        store = DataStore()
        store.open_for_scan(str(file))
        scalars = (one["data"] for one in map(json.loads, store) if one["model_type"] == "Scalar")
        points += [(one["step"], one["metric"]["data"]) for one in scalars if one["key"] == "loss"]
    return points
