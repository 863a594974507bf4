"""EvalScope as an evaluation harness, for question sets (scored by exact match) and its own benchmarks.

It asks all questions as chats. It is a program in its own environment, made when first asked for.
"""

import difflib
import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType

from stages.core.contract import StageContext
from stages.core.errors import EvaluationError
from stages.harnesses.evalscope.own_rows import OF_OWN_ROWS
from stages.harnesses.harness import Evaluation, Results, TaskItem
from stages.harnesses.installation import EVALSCOPE
from stages.harnesses.question_sets import QuestionSetHarness, question_sets
from stages.serving.served_models import ServedModel

METRIC = "exact_match"


class EvalScope(QuestionSetHarness):
    """EvalScope as an evaluation harness; implements `Harness`."""

    name = "evalscope"
    title = "EvalScope"
    asks_in_texts = True
    unused: Mapping[str, str] = MappingProxyType(
        {
            "judge": "no judge is asked",
            "trust_task_code": "question sets have no code",
            "episodes": "the model answers once",
        }
    )

    def version(self) -> str:
        return EVALSCOPE.version()

    def to_install(self) -> str | None:
        return EVALSCOPE.to_install()

    def problems(self, evaluation: Evaluation) -> Iterator[str]:
        return iter(())

    def may_give(self, score: str, evaluation: Evaluation) -> bool:
        """Return whether an EvalScope task can produce a score; EvalScope's own benchmarks may give any metric."""
        sets = question_sets(evaluation)
        own = (task for task in evaluation.tasks if task not in sets or task in OF_OWN_ROWS)
        return score in [f"{task}.{METRIC}" for task in sets] or any(score.startswith(f"{task}.") for task in own)

    def prepare(self, evaluation: Evaluation, cache: Path, doing: Callable[[str], None] = print) -> None:
        from stages.harnesses.evalscope.running import read_answered

        if EVALSCOPE.is_missing:
            EVALSCOPE.make(doing)
        index = EVALSCOPE.find().package / "benchmarks" / "_index.json"
        sets, own = question_sets(evaluation), list(json.loads(index.read_bytes()))
        for task in evaluation.tasks:
            if task in sets:
                read_answered(evaluation, task)
            elif task not in own:
                close = difflib.get_close_matches(task, [*sets, *own], n=3, cutoff=0.5)
                meant = f"did you mean {' or '.join(close)}?" if close else "see `evalscope benchmark-info`"
                folder = evaluation.task_folder
                where = f"neither {folder} nor EvalScope has" if folder else "EvalScope does not have"
                raise EvaluationError(f"{where} a task {task!r}; {meant}")

    def items(self, evaluation: Evaluation, context: StageContext) -> Iterator[TaskItem]:
        sets = question_sets(evaluation)
        if own := [task for task in evaluation.tasks if task not in sets]:
            raise EvaluationError(
                f"rows cannot be compared with EvalScope's own {', '.join(own)}, whose samples only it reads; name in "
                "`benchmarks` what they are to be compared with, such as lm-eval's tasks of the same name"
            )
        return super().items(evaluation, context)

    def evaluate(
        self, evaluation: Evaluation, context: StageContext, await_model: Callable[[], ServedModel]
    ) -> Results:
        from stages.harnesses.evalscope.running import evaluated

        if not evaluation.apply_chat_template:
            raise EvaluationError(
                "EvalScope asks as a user of a chat, but the model is asked in plain text: it was trained so, has no "
                "chat template, or the recipe says `apply_chat_template: false`; take another harness"
            )
        return evaluated(EVALSCOPE.find(), evaluation, context, await_model())
