"""Problems in the inputs of later stages are found before any training, by a separate process."""

import json
import logging
import os
import resource
import signal
from datetime import UTC, datetime

import pytest

from flows.cli.show import refresh_as_text
from flows.launch import stage_process
from flows.planning.plan import plan
from flows.recipe.recipe import load_stages
from flows.running import validation
from flows.running.refresh_run import RefreshRun
from flows.running.request import PlannedRefresh, RefreshRequest
from flows.running.runner import BuiltStage
from flows.store.record import Record
from flows.store.store import Store
from stages.__main__ import run_stage
from stages.adapters.files import copy_companions
from stages.core.errors import DataError, EvaluationError, ModelError
from stages.core.supervised import SupervisedProcess
from stages.hubs.builtin import qwen3
from stages.kinds.check.config import FINDINGS_FILE

CHAT = {"messages": [{"role": "user", "content": "1 + 1?"}, {"role": "assistant", "content": "2"}]}
PAIR = {"prompt": "1 + 1 = ", "chosen": "2", "rejected": "3"}
LEARNING = {"kind": "train", "global_batch_size": 4, "learning_rate": 1e-3, "steps": 1000}
TREE = {
    "base": {"kind": "download", "model": "builtin/qwen3-1m"},
    "chats": {"kind": "download", "dataset": "builtin/addition"},
    "pairs": {"kind": "download", "dataset": "builtin/addition-preferences"},
    "sft": {**LEARNING, "method": "sft", "model": "base", "data": {"dataset": "chats"}},
    "dpo": {**LEARNING, "method": "dpo", "model": "sft", "data": {"dataset": "pairs"}},
    "int8": {"kind": "quantize", "model": "dpo", "method": "int8", "calibration": {"dataset": "chats"}},
    "scores": {"kind": "evaluate", "model": "int8", "tasks": ["addition"], "task_folder": "configs/tasks"},
}
ROWS = {
    "chats": [{"messages": [{**CHAT["messages"][0], "content": f"{n}?"}, CHAT["messages"][1]]} for n in range(200)],
    "pairs": [{**PAIR, "prompt": f"{n} = "} for n in range(20)],
}


def write_rows(folder, rows, split="train"):
    (folder / "data").mkdir(parents=True, exist_ok=True)
    (folder / "data" / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.fixture
def artifacts(tmp_path):
    """Provide the artifacts of the download stages: a model, and valid datasets."""
    (tmp_path / "base" / "model").mkdir(parents=True)
    qwen3.make(tmp_path / "base" / "model")
    for name, rows in ROWS.items():
        write_rows(tmp_path / name, rows)
    return {name: tmp_path / name for name in ("base", "chats", "pairs")}


@pytest.fixture
def refresh_of(tmp_path, monkeypatch, artifacts, request):
    """Provide a function that makes a refresh with finished downloads; keyword arguments change or add stages."""
    monkeypatch.setenv("LIFECYCLE_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")

    def make(launch=stage_process.start, **changes):
        tree = {name: {**TREE.get(name, {}), **changes.get(name, {})} for name in {**TREE, **changes}}
        recipe = load_stages("small", request.config.rootpath, tree)
        store = Store(tmp_path / "store")
        planned = plan(recipe, {name: {} for name in recipe.stages}, store.index())
        run = RefreshRun(PlannedRefresh(RefreshRequest("small.yaml"), planned, store), launch=launch)
        run.built.update({name: built(planned.stages[name], folder) for name, folder in artifacts.items()})
        return run

    return make


def built(planned, folder):
    now = datetime.now(UTC)
    record = Record(
        recipe="small",
        stage=planned.name,
        kind=planned.kind,
        product=planned.config.product,
        version=planned.version,
        identity=planned.identity,
        upstream={},
        digest="0" * 64,
        files={},
        tags={},
        started=now,
        finished=now,
        seconds=0.0,
        packages={},
        git_commit=None,
    )
    return BuiltStage(planned.name, planned.kind, planned.version, "built", 0.0, folder, record)


class Here:
    """Fake stage process that checks later stages' inputs within the test's own process, to save its imports."""

    token = ""

    def __init__(self, work, config):
        run_stage(work)

    def poll(self):
        return 0

    def stop(self):
        pass


def processor_time_of_children_s() -> float:
    """Return the CPU seconds that child processes have used, which other load on the machine does not change."""
    spent = resource.getrusage(resource.RUSAGE_CHILDREN)
    return spent.ru_utime + spent.ru_stime


def test_everything_wrong_is_said_by_stage_and_field_before_anything_trains(refresh_of, artifacts, tmp_path):
    write_rows(artifacts["pairs"], [*ROWS["pairs"], {**PAIR, "rejected": "2"}])
    template = tmp_path / "broken.jinja"
    template.write_text("{% for message in")
    run = refresh_of(
        sft={"data": {"dataset": "chats", "evaluation_split": "test"}},
        int8={"calibration": {"dataset": "chats", "split": "calibration"}},
        scores={"apply_chat_template": True, "tasks": ["additoin"]},
        server={"kind": "serve", "model": "int8", "serving": {"tensor_parallel_size": 3}},
    )
    before_s = processor_time_of_children_s()
    with pytest.raises(DataError, match=r"stages\.sft\.data\.evaluation_split: no files of the split 'test'"):
        run.check_inputs(logging.getLogger())
    assert processor_time_of_children_s() - before_s < 60
    entries = {name: entry for name, entry in run.record.stages.items() if entry.state == "failed"}
    assert entries.keys() == {"sft", "dpo", "int8", "scores", "server"}
    assert "stages.dpo.data.dataset: training rows: 1 of 21 rows cannot be learned from:" in entries["dpo"].error
    assert "train.jsonl:21 has the same `chosen` and `rejected`" in entries["dpo"].error
    assert "stages.int8.calibration: no files of the split 'calibration'" in entries["int8"].error
    assert "did you mean addition" in entries["scores"].error
    assert entries["scores"].error_class == "EvaluationError"
    assert "stages.server.serving.tensor_parallel_size: 3 ranks, but the model's 4 att" in entries["server"].error
    record = run.finish()
    assert (record.state, record.error) == ("failed", "failed: sft, dpo, int8, scores, server")
    assert "stages.dpo.data.dataset" in refresh_as_text(record)
    assert not (run.ledger.folder / "check").exists()


def test_good_inputs_pass_and_what_was_prepared_is_found_by_the_stage(refresh_of, tmp_path):
    run = refresh_of(launch=Here)
    run.check_inputs(logging.getLogger())
    assert {entry.state for entry in run.record.stages.values()} == {"waiting"}
    assert len([*run.store.cache_folder("train").glob("tokenized/*/about.json")]) == 2


def test_an_adapter_that_cannot_go_on_the_model_is_found_before_what_it_starts_from_is_trained(refresh_of):
    adapter = {"target_modules": ["q_proj", "fc1"], "rank": 8}
    run = refresh_of(launch=Here, tuned={**TREE["sft"], "model": "sft", "adapter": adapter})
    with pytest.raises(ModelError, match=r"stages\.tuned\.adapter: .*names fc1, which it does not have; .* q_proj"):
        run.check_inputs(logging.getLogger())


def test_an_adapter_that_is_there_stands_for_no_model_but_has_its_chat_template(refresh_of, artifacts, tmp_path):
    run = refresh_of(
        launch=Here,
        dpo={"adapter": {}},
        merged={"kind": "merge", "model": "sft", "adapter": "dpo"},
        int8={"model": "merged"},
        scores={"model": "dpo", "apply_chat_template": True},
    )
    adapter = tmp_path / "dpo" / "adapter"
    adapter.mkdir(parents=True)
    copy_companions(artifacts["base"] / "model", adapter)
    there = {"sft": artifacts["base"], "dpo": tmp_path / "dpo"}
    run.built.update({name: built(run.plan.stages[name], folder) for name, folder in there.items()})
    run.check_inputs(logging.getLogger())

    (adapter / "chat_template.jinja").unlink()
    with pytest.raises(EvaluationError, match=r"stages\.scores\.apply_chat_template: .*adapter has no chat template"):
        run.check_inputs(logging.getLogger())


def test_a_check_that_dies_stops_nothing(refresh_of, caplog):
    def killed(work, config):
        process = stage_process.start(work, config)
        os.kill(process.pid, signal.SIGKILL)
        return process

    run = refresh_of(launch=killed)
    run.check_inputs(logging.getLogger())
    assert "inputs could not be checked before their stages' turns" in caplog.text
    assert {entry.state for entry in run.record.stages.values()} == {"waiting"}


FOUND = {"stage": "dpo", "field": "data.dataset", "error": "DataError", "message": "a row is bad"}
UNSEEN = {"stage": "sft", "field": "data.dataset", "message": "training rows after train.jsonl:7 were not looked at"}


def hanging(work, found=None):
    """Start a fake check of later stages' inputs that never ends; it has already written the given results."""
    if found:
        (work / FINDINGS_FILE).write_text(json.dumps(found))
    with (work / "log.txt").open("ab") as log:
        return SupervisedProcess(["sleep", "600"], environment=os.environ, output=log)


def test_what_was_found_before_the_time_was_over_is_said(refresh_of, monkeypatch, caplog):
    monkeypatch.setattr(validation, "TIMEOUT_S", 0.1)
    run = refresh_of(launch=lambda work, config: hanging(work, {"problems": [FOUND], "unseen": [UNSEEN]}))
    with pytest.raises(DataError, match=r"stages\.dpo\.data\.dataset: a row is bad"):
        run.check_inputs(logging.getLogger())
    assert "checked in part: stages.sft.data.dataset: training rows after train.jsonl:7 were not looked" in caplog.text


def test_a_check_that_found_nothing_in_its_time_stops_nothing(refresh_of, monkeypatch, caplog):
    monkeypatch.setattr(validation, "TIMEOUT_S", 0.1)
    run = refresh_of(launch=lambda work, config: hanging(work))
    run.check_inputs(logging.getLogger())
    assert "ran for more than 0.1 s" in caplog.text
    assert {entry.state for entry in run.record.stages.values()} == {"waiting"}


def test_nothing_is_checked_for_stages_that_do_not_run_or_whose_data_is_not_made(refresh_of):
    def launch(work, config):
        raise AssertionError("there is nothing to check")

    run = refresh_of(launch=launch)
    for name in ("base", "chats", "pairs"):
        del run.built[name]
    run.check_inputs(logging.getLogger())
