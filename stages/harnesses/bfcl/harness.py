"""BFCL (Berkeley Function Calling Leaderboard) as an evaluation harness: its questions, its tools, and its checkers.

The package is a program in its own environment, made when first asked for; the model is asked by this project's client.
"""

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType

from stages.core.contract import StageContext
from stages.core.errors import EvaluationError
from stages.core.files import read_json_lines
from stages.harnesses.bfcl.categories import METRIC, problem_of
from stages.harnesses.harness import Evaluation, Results, TaskItem
from stages.harnesses.installation import BFCL
from stages.harnesses.question_sets import QuestionSetHarness
from stages.serving.served_models import ServedModel


class Bfcl(QuestionSetHarness):
    """BFCL as an evaluation harness; implements `Harness`."""

    name = "bfcl"
    title = "BFCL"
    asks_in_texts = False
    unused: Mapping[str, str] = MappingProxyType(
        {
            "judge": "no judge is asked",
            "task_folder": "its questions come with its package",
            "num_fewshot": "questions are asked without examples",
            "trust_task_code": "its package has no code of yours",
            "episodes": "its categories have their own tools and ends",
        }
    )

    def version(self) -> str:
        return BFCL.version()

    def to_install(self) -> str | None:
        return BFCL.to_install()

    def problems(self, evaluation: Evaluation) -> Iterator[str]:
        for task in evaluation.tasks:
            if problem := problem_of(task):
                yield f"tasks: {problem}"

    def may_give(self, score: str, evaluation: Evaluation) -> bool:
        return score in [f"{task}.{METRIC}" for task in evaluation.tasks]

    def prepare(self, evaluation: Evaluation, cache: Path, doing: Callable[[str], None] = print) -> None:
        for task in evaluation.tasks:
            if problem := problem_of(task):
                raise EvaluationError(problem)
        if BFCL.is_missing:
            BFCL.make(doing)

    def items(self, evaluation: Evaluation, context: StageContext) -> Iterator[TaskItem]:
        self.prepare(evaluation, context.cache, context.doing)
        data = BFCL.find().package / "data"
        for task in evaluation.tasks:
            (file,) = data.glob(f"BFCL_v*_{task}.json")
            for number, row in enumerate(read_json_lines(file)):
                texts = tuple(str(message["content"]) for turn in row["question"] for message in turn)
                yield TaskItem(task, number, texts, texts)

    def evaluate(
        self, evaluation: Evaluation, context: StageContext, await_model: Callable[[], ServedModel]
    ) -> Results:
        from stages.harnesses.bfcl.asking import asked

        if not evaluation.apply_chat_template:
            raise EvaluationError(
                "BFCL asks as a user of a chat, but the model is asked in plain text: it was trained so, has no chat "
                "template, or the recipe says `apply_chat_template: false`; take another harness"
            )
        return asked(BFCL.find(), evaluation, context, await_model)
