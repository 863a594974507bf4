"""Training on a mixture keeps the requested shares and the order of rows under every layout and after kills.

Losses are logged by dataset.
"""

import json
import math
import shutil

import pytest
from refreshes import eventually

from stages.core.contract import StageResult
from stages.data.summaries import LENGTHS_FILE, Lengths
from tests.train_stage import finish_again, logged, make_artifacts, make_config, make_context, run_to_end, start

NUM_STEPS = 6
OFTEN_SAVED = {"checkpoint_every_steps": 2}
PARTS = [{"dataset": "problems", "weight": 0.7}, {"dataset": "texts", "weight": 0.3, "format": "text"}]


@pytest.fixture(scope="module")
def artifacts(tmp_path_factory):
    artifacts = make_artifacts(tmp_path_factory.mktemp("artifacts"))
    folder = artifacts["texts"] = artifacts["base"].parent / "texts"
    (folder / "data").mkdir(parents=True)
    for split, number in (("train", 12), ("validation", 5)):
        rows = [{"text": f"{split}: {index} is a number, and so is {index + 1}."} for index in range(number)]
        (folder / "data" / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return artifacts


def config_of(parts=PARTS, steps=NUM_STEPS, method="sft", evaluation_split="validation", sequence_length=64, **fields):
    data = {"datasets": parts, "evaluation_split": evaluation_split, "sequence_length": sequence_length}
    return make_config(method, data=data, steps=steps, schedule="constant", adam_epsilon=1e-3, **fields)


def learned(work, artifacts, parts=PARTS, **fields):
    """Train on a mixture of datasets; return the losses of the steps and the final metrics."""
    config = config_of(parts, **fields)
    make_context(work, artifacts, config)
    run_to_end(work, config)
    metrics = StageResult.model_validate_json((work / "result.json").read_text()).metrics
    return [row["loss"] for row in logged(work)], metrics


def shares_and_losses(metrics):
    return {name: value for name, value in metrics.items() if name.startswith(("share_seen", "evaluation_loss"))}


def weights(work):
    return (work / "model" / "model.safetensors").read_bytes()


@pytest.fixture(scope="module")
def one_process(artifacts, tmp_path_factory):
    work = tmp_path_factory.mktemp("one") / "work"
    return *learned(work, artifacts, execution=OFTEN_SAVED), work


def test_losses_by_dataset_are_parts_of_the_whole(one_process):
    _, metrics, work = one_process
    lengths = Lengths.model_validate_json((work / LENGTHS_FILE).read_bytes()).counts
    assert lengths.keys() == {"problems", "texts"}
    assert sum(map(sum, lengths.values())) == metrics["num_documents"]
    assert metrics["share_asked.texts"] == pytest.approx(0.3)
    assert metrics["share_seen.texts"] == pytest.approx(0.3, abs=0.1)
    low, high = sorted(metrics[f"evaluation_loss.{name}"] for name in ("problems", "texts"))
    assert low < metrics["evaluation_loss"] < high


def test_on_two_processes_it_is_learned_in_the_same_order(artifacts, one_process, tmp_path):
    losses, metrics = learned(tmp_path / "work", artifacts, layout={"dp_shard": 2, "micro_batch_size": 1})
    assert losses == pytest.approx(one_process[0], rel=1e-5)
    assert shares_and_losses(metrics) == pytest.approx(shares_and_losses(one_process[1]), rel=1e-4)


def test_on_megatron_it_is_learned_in_the_same_order(artifacts, one_process, tmp_path):
    layout = {"tp": 2, "micro_batch_size": 2}
    losses, metrics = learned(tmp_path / "work", artifacts, engine="megatron", layout=layout)
    assert losses == pytest.approx(one_process[0], rel=1e-4)
    assert shares_and_losses(metrics) == pytest.approx(shares_and_losses(one_process[1]), rel=1e-3)


def test_resumed_it_ends_with_the_very_weights_of_an_uninterrupted_one(artifacts, one_process, tmp_path):
    finish_again(one_process[2], 4, tmp_path / "work", artifacts, config_of(execution=OFTEN_SAVED))
    assert weights(tmp_path / "work") == weights(one_process[2])


@pytest.mark.nightly
def test_killed_and_resumed_it_ends_with_the_very_weights_of_an_uninterrupted_one(artifacts, one_process, tmp_path):
    """Killed training on a mixture resumes to bitwise the same weights.

    `make test` covers this by the test above and by kills in `test_train_faults.py`.
    """
    work = tmp_path / "work"
    config = config_of(layout={"micro_batch_size": 2}, execution=OFTEN_SAVED)
    for _ in range(5):  # on a busy machine it may have ended before it is killed
        shutil.rmtree(work, ignore_errors=True)
        make_context(work, artifacts, config)
        process = start(work, config)
        eventually((work / "scratch" / "checkpoints" / "step-2").exists)
        process.kill()
        process.wait()
        if not (work / "model").exists():
            break
    assert not (work / "model").exists(), "or nothing was interrupted"
    run_to_end(work, config)
    assert "continuing from the checkpoint of step" in (work / "log.txt").read_text()
    assert weights(work) == weights(one_process[2])


def test_pairs_of_two_datasets_are_learned_in_the_same_order_on_two_processes(artifacts, tmp_path):
    halves = dict(artifacts)
    lines = (artifacts["preferences"] / "data" / "train.jsonl").read_text().splitlines(keepends=True)
    for name, own in (("new", lines[:20]), ("old", lines[20:])):
        halves[name] = tmp_path / name
        (halves[name] / "data").mkdir(parents=True)
        (halves[name] / "data" / "train.jsonl").write_text("".join(own))
    parts = [{"dataset": "new", "weight": 3}, {"dataset": "old", "weight": 1}]
    curves = []
    for name, layout in {"alone": {"micro_batch_size": 4}, "shared": {"dp_shard": 2, "micro_batch_size": 1}}.items():
        fields = {"method": "dpo", "evaluation_split": None, "sequence_length": 128}
        losses, metrics = learned(tmp_path / name / "work", halves, parts, layout=layout, **fields)
        assert losses[0] == pytest.approx(math.log(2), abs=1e-6)
        assert metrics["share_seen.new"] == pytest.approx(0.75, abs=0.05)
        curves.append(losses)
    assert curves[0][-1] < math.log(2) - 1e-4, "or nothing was learned"
    assert curves[1] == pytest.approx(curves[0], rel=1e-5)
