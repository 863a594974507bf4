"""A new evaluation harness needs a module and a line in the registry; then evaluate stages can use it."""

import json
import signal
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from stages.core.contract import StageContext
from stages.core.errors import EvaluationError
from stages.harnesses import registry
from stages.harnesses.harness import Results
from stages.kinds.evaluate.config import EvaluateConfig
from stages.kinds.evaluate.run import run
from stages.kinds.promote.paired import compare
from tests.hub_repository import model_files
from tests.tiny_engine import TinyEngine
from tests.unit.stages.kinds.evaluate.exact_match import ExactMatch

QUESTIONS = [("What is 1 + 2?", "3"), ("What is 20 + 22?", "42"), ("What is 2 + 2?", "5"), ("Who is there?", "?")]


@pytest.fixture(autouse=True)
def harness(tiny_engine: TinyEngine, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setitem(registry.HARNESSES, "exact", ExactMatch())
    handler = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, handler)


@pytest.fixture
def config(tmp_path: Path) -> EvaluateConfig:
    (tmp_path / "tasks").mkdir()
    rows = (json.dumps({"question": question, "answer": answer}) + "\n" for question, answer in QUESTIONS)
    (tmp_path / "tasks" / "sums.jsonl").write_text("".join(rows))
    tree = {
        "kind": "evaluate",
        "model": "sft",
        "harness": "exact",
        "tasks": ["sums"],
        "task_folder": str(tmp_path / "tasks"),
    }
    return EvaluateConfig.model_validate(tree)


def evaluate(config: EvaluateConfig, folder: Path, name: str):
    for file, content in model_files(1000).items():
        path = folder / "sft" / "model" / file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    (folder / name).mkdir()
    return run(config, StageContext(folder / name, name, "0" * 12, {"sft": folder / "sft"}, {}, folder / "cache"))


def test_its_version_and_what_it_resolves_are_part_of_the_stages(config: EvaluateConfig) -> None:
    assert config.resolve_outside() == {"exact_version": "0.1", "tiny_version": "1.2", "letters": "all"}


def test_its_scores_are_metrics_and_its_samples_can_be_paired(config: EvaluateConfig, tmp_path: Path) -> None:
    result = evaluate(config, tmp_path, "first")
    evaluate(config.model_copy(update={"limit": 2}), tmp_path, "second")

    assert result.metrics == {"sums.exact_match": 0.75}
    assert result.tags == {"exact_version": "0.1", "tiny_version": "1.2"}
    assert result.files == ["scores.json", "samples/sums.jsonl"]
    [difference] = compare([tmp_path / "first"], [tmp_path / "second"])
    assert (difference.num_samples, difference.num_unpaired, difference.difference) == (2, 2, 0.0)


def test_a_task_that_it_does_not_have_is_refused_before_a_server_starts(config: EvaluateConfig, tmp_path: Path) -> None:
    with pytest.raises(EvaluationError, match="Exact does not have a task 'products'"):
        evaluate(config.model_copy(update={"tasks": ("products",)}), tmp_path, "work")
    assert not (tmp_path / "work" / "server.log").exists()


class Scoreless(ExactMatch):
    """Evaluation harness that sends all requests, and returns samples without scores."""

    def evaluate(self, *arguments: Any) -> Results:
        results = super().evaluate(*arguments)
        return replace(results, scores={**results.scores, "results": {}})


def test_an_evaluation_without_scores_is_kept_with_its_samples_and_refused(
    config: EvaluateConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(registry.HARNESSES, "exact", Scoreless())
    for file, content in model_files(1000).items():
        path = tmp_path / "sft" / "model" / file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    (tmp_path / "work").mkdir()
    context = StageContext(tmp_path / "work", "e", "0" * 12, {"sft": tmp_path / "sft"}, {}, tmp_path / "cache")
    result = run(config, context)
    (finding,) = context.findings
    assert isinstance(finding, EvaluationError)
    assert str(finding) == "Exact gave no scores for sums; read scores.json there"
    assert result.files == ["scores.json", "samples/sums.jsonl"]
    assert len((tmp_path / "work" / "samples" / "sums.jsonl").read_text().splitlines()) == len(QUESTIONS)
