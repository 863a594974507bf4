"""BFCL (Berkeley Function Calling Leaderboard) as an evaluation harness: its questions, its tools, and its checkers.

The package is a program in its own environment, made when first asked for; the model is asked by this project's client.
"""

import difflib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType

from stages.core.contract import StageContext
from stages.core.errors import EvaluationError
from stages.core.files import read_json_lines
from stages.harnesses.harness import Evaluation, Results, TaskItem
from stages.harnesses.installation import BFCL
from stages.harnesses.question_sets import QuestionSetHarness
from stages.serving.served_models import ServedModel

METRIC = "accuracy"
CATEGORIES = (
    *("simple_python", "simple_java", "simple_javascript", "multiple", "parallel", "parallel_multiple", "irrelevance"),
    *("live_simple", "live_multiple", "live_parallel", "live_parallel_multiple", "live_irrelevance", "live_relevance"),
    *("multi_turn_base", "multi_turn_miss_func", "multi_turn_miss_param", "multi_turn_long_context"),
)
"""BFCL's categories that need nothing from outside, whose questions come with the package."""
_SEARCH = "its tools search the web, by a service with a key"
_MEMORY = "its conversations are kept in files that later questions read, some by an embedding model from a hub"
REFUSED: Mapping[str, str] = MappingProxyType(
    {
        **dict.fromkeys(("web_search", "web_search_base", "web_search_no_snippet"), _SEARCH),
        **dict.fromkeys(("memory", "memory_kv", "memory_vector", "memory_rec_sum"), _MEMORY),
        "agentic": "its categories search the web, or keep files",
        "format_sensitivity": "it compares formats of prompts, and is no score of its own",
    }
)
"""Reason for each category of BFCL that is not run here."""
NUM_NAMED = 4


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
            if problem := _problem(task):
                yield f"tasks: {problem}"

    def may_give(self, score: str, evaluation: Evaluation) -> bool:
        return score in [f"{task}.{METRIC}" for task in evaluation.tasks]

    def prepare(self, evaluation: Evaluation, cache: Path, doing: Callable[[str], None] = print) -> None:
        for task in evaluation.tasks:
            if problem := _problem(task):
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


def _problem(task: str) -> str | None:
    """Return why a category cannot be run, and what to take instead; None for one that can."""
    if task in CATEGORIES:
        return None
    if why := REFUSED.get(task):
        return f"BFCL's {task} is not run here: {why}; take {', '.join(CATEGORIES[:NUM_NAMED])} or another"
    close = [one for one in CATEGORIES if one.startswith(f"{task}_")]
    close = close or difflib.get_close_matches(task, [*CATEGORIES, *REFUSED], n=NUM_NAMED, cutoff=0.5)
    meant = f"did you mean {' or '.join(close)}?" if close else f"expected one of {', '.join(CATEGORIES)}"
    return f"BFCL has no category {task!r}; {meant}"
