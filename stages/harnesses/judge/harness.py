"""Evaluation harness in which a judge, any model behind OpenAI's API, rates the answers to question sets."""

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType

from stages.core.contract import StageContext
from stages.core.errors import EvaluationError
from stages.harnesses.harness import Evaluation, Results
from stages.harnesses.pictures import media_of
from stages.harnesses.question_sets import QuestionSetHarness, read_questions
from stages.serving.served_models import ServedModel

VERSION = "1"
"""Version of the judge harness; raise it when the same questions, answers and ratings would give other scores."""
METRIC = "rating"


class Judge(QuestionSetHarness):
    """Evaluation harness in which a judge model rates the answers to question sets; implements `Harness`."""

    name = "judge"
    title = "the judge"
    asks_in_texts = False
    unused: Mapping[str, str] = MappingProxyType(
        {
            "episodes": "the model answers once",
            "num_fewshot": "questions are asked without examples",
            "seed": "nothing is drawn",
            "trust_task_code": "question sets have no code",
        }
    )

    def version(self) -> str:
        return VERSION

    def to_install(self) -> str | None:
        return None

    def problems(self, evaluation: Evaluation) -> Iterator[str]:
        if evaluation.judge is None:
            yield "judge: is missing; with `harness: judge` say which model of which server rates the answers"

    def may_give(self, score: str, evaluation: Evaluation) -> bool:
        return score in [f"{task}.{METRIC}" for task in evaluation.tasks]

    def prepare(self, evaluation: Evaluation, cache: Path, doing: Callable[[str], None] = print) -> None:
        from stages.harnesses.judge.rating import probe_judge

        most_pictures = 0
        for task in evaluation.tasks:
            counts = [len(media_of(one.document)) for one in read_questions(evaluation, task)]  # checks every question
            if not counts:
                raise EvaluationError(f"the task {task} has no questions")
            most_pictures = max(most_pictures, *counts)
        probe_judge(evaluation, cache, most_pictures)

    def evaluate(
        self, evaluation: Evaluation, context: StageContext, await_model: Callable[[], ServedModel]
    ) -> Results:
        from stages.harnesses.judge.rating import rated

        return rated(evaluation, context, await_model())
