"""An lm-eval task given by name loads its dataset from a hub, and the dataset's commit is part of the cache key."""

import io
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest

from stages.core.contract import StageResult
from stages.core.errors import DownloadError
from stages.kinds.evaluate.config import EvaluateConfig
from tests.hub_server import HubServer, running_hub
from tests.serving import SERVING, make_model, run_to_the_end, write_work

REPOSITORY = "datasets/allenai/ai2_arc"
NUM_QUESTIONS = 8
CARD = b"""---
configs:
- config_name: ARC-Easy
  data_files:
  - {split: train, path: ARC-Easy/train-*}
  - {split: validation, path: ARC-Easy/validation-*}
  - {split: test, path: ARC-Easy/test-*}
---
"""
CHECK = """
import json, sys
from pathlib import Path
import lm_eval.tasks
from stages.harnesses.lm_eval.tasks import check_loaded
arc = Path(lm_eval.tasks.__file__).with_name("arc")
loaded = lm_eval.tasks.TaskManager(include_path=arc, include_defaults=False).load("arc_easy")
for expected in sys.argv[1:]:
    check_loaded(loaded["tasks"].values(), json.loads(expected), Path("kept"))
    print("as planned")
"""
CONFIG = {"model": "sft", "serving": SERVING, "tasks": ["arc_easy"], "num_fewshot": 1}


def questions(subject: str) -> bytes:
    """Return a Parquet file with questions in the columns of AI2's ARC dataset."""
    rows = [
        {
            "id": f"{subject}-{number}",
            "question": f"What comes after {number}?",
            "choices": {"text": [str(number + 1), str(number + 2), "a horse"], "label": ["A", "B", "C"]},
            "answerKey": "A",
        }
        for number in range(NUM_QUESTIONS)
    ]
    stream = io.BytesIO()
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), stream)
    return stream.getvalue()


def repository_files(subject: str) -> dict[str, bytes]:
    splits = {
        f"ARC-Easy/{split}-00000-of-00001.parquet": questions(subject) for split in ("train", "validation", "test")
    }
    return {"README.md": CARD, **splits}


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[HubServer]:
    with running_hub() as server:
        server.repository(REPOSITORY).commit(repository_files("first"))
        monkeypatch.setenv("HF_ENDPOINT", server.url)
        monkeypatch.setenv("HF_HOME", str(tmp_path / "hub-cache"))
        yield server


def outside() -> dict[str, object]:
    return EvaluateConfig.model_validate({"kind": "evaluate", **CONFIG}).resolve_outside()


def test_the_commit_of_the_dataset_is_part_of_the_version(hub: HubServer) -> None:
    first = outside()
    second_commit = hub.repository(REPOSITORY).commit(repository_files("second"))

    assert first["hub_datasets"] != outside()["hub_datasets"] == {"allenai/ai2_arc": second_commit}


def test_a_dataset_that_the_hub_does_not_have_is_told_when_the_refresh_is_planned(hub: HubServer) -> None:
    hub.repositories.clear()
    with pytest.raises(DownloadError, match=r"hf://datasets/allenai/ai2_arc: .* has no such dataset"):
        outside()


@pytest.mark.nightly
def test_a_task_of_lm_eval_runs_on_its_dataset_from_the_hub(hub: HubServer, tmp_path: Path) -> None:
    """`make test` loads such a task, below, and has a vLLM asked about tasks of its own (`test_serve_evaluate.py`)."""
    make_model(tmp_path / "sft" / "model")
    planned = outside()
    work = write_work(tmp_path / "work", "evaluate", CONFIG, {"sft": tmp_path / "sft"}, outside=planned)

    result: StageResult = run_to_the_end(work)

    rows = [json.loads(line) for line in (work / "samples" / "arc_easy.jsonl").read_text().splitlines()]
    assert [row["doc"]["id"] for row in rows] == [f"first-{number}" for number in range(NUM_QUESTIONS)]
    assert result.metrics["arc_easy.acc"] == pytest.approx(sum(row["acc"] for row in rows) / NUM_QUESTIONS)


def test_samples_of_another_commit_than_was_planned_are_not_scored(hub: HubServer) -> None:
    planned = outside()
    hub.repository(REPOSITORY).commit(repository_files("second"))

    # A new process, since libraries read HF_ENDPOINT once.
    command = [sys.executable, "-c", CHECK, json.dumps(outside()), json.dumps(planned)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert done.stdout.splitlines()[-1] == "as planned", done.stderr
    assert done.stdout.count("as planned") == 1
    assert done.returncode != 0
    error = "TransientError: the dataset allenai/ai2_arc changed after this refresh was planned"
    assert error in done.stderr.splitlines()[-1]
