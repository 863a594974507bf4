"""Evaluation harness for tests, which asks the questions of `TASK.jsonl` and compares answers exactly."""

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType

from pydantic import JsonValue

from stages.core.contract import StageContext
from stages.core.errors import EvaluationError
from stages.harnesses.harness import Evaluation, Results, TaskItem
from stages.serving.served_models import ServedModel

METRIC = "exact_match"


class ExactMatch:
    name = "exact"
    title = "Exact"
    unused: Mapping[str, str] = MappingProxyType({"judge": "no judge is asked"})

    def version(self) -> str:
        return "0.1"

    def to_install(self) -> str | None:
        return None

    def problems(self, evaluation: Evaluation) -> Iterator[str]:
        return iter(())

    def resolve_outside(self, evaluation: Evaluation, limit_s: float | None = None) -> dict[str, JsonValue]:
        return {"letters": "all"}

    def custom_code(self, evaluation: Evaluation) -> tuple[str, ...]:
        return ()

    def may_give(self, score: str, evaluation: Evaluation) -> bool:
        return score in [f"{task}.exact_match" for task in evaluation.tasks]

    def log_likelihood_tasks(self, evaluation: Evaluation) -> list[str]:
        return []

    def prepare(self, evaluation: Evaluation, cache: Path, doing: Callable[[str], None] = print) -> None:
        for task in evaluation.tasks:
            if not _file(evaluation, task).is_file():
                raise EvaluationError(f"Exact does not have a task {task!r}")

    def check(self, evaluation: Evaluation, cache: Path, model: Path | None, base: Path | None = None) -> str | None:
        self.prepare(evaluation, cache)
        return None

    def items(self, evaluation: Evaluation, context: StageContext) -> Iterator[TaskItem]:
        for task in evaluation.tasks:
            for number, line in enumerate(_file(evaluation, task).read_text().splitlines()):
                row = json.loads(line)
                yield TaskItem(task, number, (row["question"],), (row["question"], row["answer"]))

    def evaluate(
        self, evaluation: Evaluation, context: StageContext, await_model: Callable[[], ServedModel]
    ) -> Results:
        questions = {task: _file(evaluation, task).read_text().splitlines() for task in evaluation.tasks}
        model = await_model()
        samples = {
            task: [_sample(number, json.loads(line), model) for number, line in enumerate(lines[: evaluation.limit])]
            for task, lines in questions.items()
        }
        means = {task: sum(row[METRIC] for row in rows) / len(rows) for task, rows in samples.items()}
        scores = {
            "results": {task: {f"{METRIC},none": mean} for task, mean in means.items()},
            "configs": {task: {} for task in samples},
            "versions": dict.fromkeys(samples, 1),
            "n-shot": dict.fromkeys(samples, 0),
            "higher_is_better": {task: {METRIC: True} for task in samples},
        }
        return Results(scores, samples)


def _file(evaluation: Evaluation, task: str) -> Path:
    assert evaluation.task_folder
    return evaluation.task_folder / f"{task}.jsonl"


def _sample(number: int, row: dict[str, str], model: ServedModel) -> dict[str, object]:
    answer = model.client.complete(row["question"], max_tokens=model.context_tokens // 2).text
    hashes = {
        f"{what}_hash": hashlib.sha256(text.encode()).hexdigest()
        for what, text in (("doc", json.dumps(row)), ("prompt", row["question"]), ("target", row["answer"]))
    }
    return {
        "doc_id": number,
        "filter": "none",
        "doc": row,
        "resps": [[answer]],
        METRIC: answer == row["answer"],
    } | hashes
