"""Evaluations use the chat template by default if the model was trained with one; a score of 0 gives a warning."""

import json
import re
import signal
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from stages.core.contract import StageContext
from stages.core.errors import EvaluationError
from stages.harnesses import registry
from stages.harnesses.harness import Evaluation, Results
from stages.harnesses.scores import zero_scores
from stages.kinds.evaluate.config import EvaluateConfig
from stages.kinds.evaluate.run import run
from stages.models.recorded import note_trained_on
from tests.hub_repository import model_files
from tests.tiny_engine import TinyEngine
from tests.unit.stages.kinds.evaluate.exact_match import ExactMatch


@dataclass
class Remembering(ExactMatch):
    asked: list[Evaluation] = field(default_factory=list)

    def evaluate(self, evaluation, context, await_model) -> Results:
        self.asked.append(evaluation)
        return super().evaluate(evaluation, context, await_model)


@pytest.fixture
def harness(tiny_engine: TinyEngine, monkeypatch: pytest.MonkeyPatch) -> Iterator[Remembering]:
    harness = Remembering()
    monkeypatch.setitem(registry.HARNESSES, "exact", harness)
    handler = signal.getsignal(signal.SIGTERM)
    yield harness
    signal.signal(signal.SIGTERM, handler)


def evaluate(folder: Path, *, trained: bool | None, template: bool, asked: bool | None, answer: str = "3") -> list[str]:
    """Run an evaluation of one question, to which the model answers 3, and return the warnings."""
    model = folder / "sft" / "model"
    model.mkdir(parents=True)
    for file, content in model_files(1000).items():
        (model / file).parent.mkdir(exist_ok=True)
        (model / file).write_bytes(content)
    if template:
        (model / "chat_template.jinja").write_text("{{ messages }}")
    if trained is not None:
        note_trained_on(model, conversations=trained)
    (folder / "tasks").mkdir()
    (folder / "tasks" / "sums.jsonl").write_text(json.dumps({"question": "1 + 2", "answer": answer}) + "\n")
    tree = {"kind": "evaluate", "model": "sft", "harness": "exact", "tasks": ["sums"]}
    config = EvaluateConfig.model_validate({**tree, "task_folder": str(folder / "tasks"), "apply_chat_template": asked})
    work = folder / "work"
    work.mkdir()
    run(config, StageContext(work, "scores", "0" * 12, {"sft": folder / "sft"}, {}, folder / "cache"))
    events = [json.loads(line) for line in (work / "events.jsonl").read_text().splitlines()]
    return [event["message"] for event in events if event["event"] == "warning"]


@pytest.mark.parametrize(
    ("trained", "template", "as_chat"),
    [(True, True, True), (False, True, False), (None, True, True), (None, False, False)],
)
def test_by_default_a_model_is_asked_as_it_was_trained(tmp_path, harness, trained, template, as_chat) -> None:
    assert evaluate(tmp_path, trained=trained, template=template, asked=None) == []
    assert [one.apply_chat_template for one in harness.asked] == [as_chat]


@pytest.mark.parametrize(("trained", "asked"), [(True, False), (False, True)])
def test_a_model_that_is_asked_otherwise_than_it_was_trained_is_warned_of(tmp_path, harness, trained, asked) -> None:
    [warning] = evaluate(tmp_path, trained=trained, template=True, asked=asked)

    assert f"apply_chat_template is {str(asked).lower()}, but the model was trained on" in warning
    assert [one.apply_chat_template for one in harness.asked] == [asked]


def test_a_chat_without_a_template_is_refused_before_anything_is_asked(tmp_path, harness) -> None:
    with pytest.raises(EvaluationError, match="has no chat template"):
        evaluate(tmp_path, trained=None, template=False, asked=True)
    assert harness.asked == []


def test_a_score_of_0_is_warned_of(tmp_path, harness) -> None:
    [warning] = evaluate(tmp_path, trained=None, template=False, asked=None, answer="never said")

    assert re.match(
        r"sums\.exact_match is 0: of [1-9]\d* answers none was right\. Read them: `lifecycle show \w+ ", warning
    )


def test_only_scores_that_are_better_when_higher_are_too_low_at_0() -> None:
    results = {"t": {"alias": "t", "acc,strict": 0.0, "acc_stderr,strict": 0.0, "wer,none": 0.0, "f1,none": 0.5}}
    scores = {"results": results, "higher_is_better": {"t": {"acc": True, "wer": False, "f1": True}}}

    assert zero_scores(scores) == ["t.strict.acc"]
