"""A stage that learns a mixture: shares as asked for and as seen, and losses by dataset."""

from __future__ import annotations

import json

import pytest

from stages.core.contract import StageResult
from tests.train_stage import logged, make_artifacts, make_config, make_context, run_to_end

NUM_STEPS = 6
PARTS = [{"dataset": "problems", "weight": 0.7}, {"dataset": "texts", "weight": 0.3, "format": "text"}]


@pytest.fixture(scope="module")
def artifacts(tmp_path_factory):
    found = make_artifacts(tmp_path_factory.mktemp("artifacts"))
    folder = found["texts"] = found["base"].parent / "texts"
    (folder / "data").mkdir(parents=True)
    for split, number in (("train", 12), ("validation", 5)):
        rows = [{"text": f"{split}: {index} is a number, and so is {index + 1}."} for index in range(number)]
        (folder / "data" / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return found


def learned(work, artifacts, parts=PARTS, steps=NUM_STEPS, **fields):
    """Losses of the steps, and the final metrics."""
    data = {"datasets": parts, "evaluation_split": "validation", "sequence_length": 64}
    config = make_config(data=data, steps=steps, schedule="constant", adam_epsilon=1e-3, **fields)
    make_context(work, artifacts, config)
    run_to_end(work, config)
    metrics = StageResult.model_validate_json((work / "result.json").read_text()).metrics
    return [row["loss"] for row in logged(work)], metrics


@pytest.fixture(scope="module")
def one_process(artifacts, tmp_path_factory):
    return learned(tmp_path_factory.mktemp("one") / "work", artifacts)


def test_losses_by_dataset_are_parts_of_the_whole(one_process):
    metrics = one_process[1]
    assert metrics["share_asked.texts"] == pytest.approx(0.3)
    assert metrics["share_seen.texts"] == pytest.approx(0.3, abs=0.1)
    low, high = sorted(metrics[f"evaluation_loss.{name}"] for name in ("problems", "texts"))
    assert low < metrics["evaluation_loss"] < high
