"""lm-eval as an evaluation harness; its import takes seconds, and happens only while a server starts."""

import os
from collections.abc import Callable, Iterator, Mapping
from importlib.metadata import version
from pathlib import Path
from types import MappingProxyType

from pydantic import JsonValue

from stages.core.contract import StageContext
from stages.core.errors import TransientError
from stages.core.intervals import NUM_CUT
from stages.harnesses.harness import Evaluation, Results, TaskItem
from stages.harnesses.lm_eval.tasks import (
    TaskSelection,
    check_loaded,
    check_trusted,
    log_likelihood_tasks,
    may_give,
    resolve_hub_datasets,
    select_tasks,
    too_many_media,
)
from stages.serving.served_models import ServedModel

PROGRESS_EVERY = 10
DATASETS = "datasets"
"""Name of the cache folder for Hugging Face's `datasets` library."""
KEPT_RESULTS = ("results", "groups", "group_subtasks", "configs", "versions", "n-shot", "higher_is_better", "n-samples")
"""Keys of lm-eval's results that are written to `scores.json`."""


class LmEval:
    """lm-eval as an evaluation harness; implements `Harness`."""

    name = "lm_eval"
    title = "lm-eval"
    asks_in_texts = True
    unused: Mapping[str, str] = MappingProxyType(
        {
            "judge": "no judge is asked",
            "generation": "tasks of lm-eval say it themselves",
            "episodes": "the model answers once",
        }
    )

    def version(self) -> str:
        return version("lm_eval")

    def to_install(self) -> str | None:
        return None

    def problems(self, evaluation: Evaluation) -> Iterator[str]:
        return iter(())

    def resolve_outside(self, evaluation: Evaluation, limit_s: float | None = None) -> dict[str, JsonValue]:
        return resolve_hub_datasets(_selection(evaluation), limit_s)

    def custom_code(self, evaluation: Evaluation) -> tuple[str, ...]:
        folder = select_tasks(evaluation.tasks, evaluation.task_folder).folder
        return folder.code if folder else ()

    def may_give(self, score: str, evaluation: Evaluation) -> bool:
        return may_give(score, evaluation.tasks, evaluation.task_folder)

    def log_likelihood_tasks(self, evaluation: Evaluation) -> list[str]:
        return log_likelihood_tasks(evaluation.tasks, evaluation.task_folder)

    def question_problems(self, evaluation: Evaluation) -> Iterator[str]:
        folder, most = evaluation.task_folder, evaluation.max_images
        if folder is None or most is None:
            return iter(())
        return too_many_media(evaluation.tasks, folder, most, evaluation.limit)

    def prepare(self, evaluation: Evaluation, cache: Path, doing: Callable[[str], None] = print) -> None:
        selection = _selection(evaluation)
        os.environ.setdefault("HF_DATASETS_CACHE", str(cache / DATASETS))
        os.environ["TOKENIZERS_PARALLELISM"] = "false"
        if selection.offline:
            os.environ |= {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}

    def check(self, evaluation: Evaluation, cache: Path, model: Path | None, base: Path | None = None) -> str | None:
        selection = _selection(evaluation)
        os.environ.setdefault("HF_DATASETS_CACHE", str(cache / DATASETS))  # `datasets` reads it at its import
        from stages.harnesses.lm_eval.rehearsal import rehearse

        try:
            rehearse(selection, evaluation, model)
        except TransientError as error:  # it may answer when the evaluation's turn comes
            return f"the tasks were not loaded: {error}"
        return None

    def items(self, evaluation: Evaluation, context: StageContext) -> Iterator[TaskItem]:
        from stages.harnesses.lm_eval import scoring
        from stages.harnesses.lm_eval.scoring import items_of

        self.prepare(evaluation, context.cache)
        tasks = scoring.load_tasks(_selection(evaluation), evaluation)["tasks"]
        check_loaded(tasks.values(), context.outside, context.cache / DATASETS)
        return items_of(tasks)

    def evaluate(
        self, evaluation: Evaluation, context: StageContext, await_model: Callable[[], ServedModel]
    ) -> Results:
        from stages.harnesses.lm_eval import scoring

        def report(num_answered: int, num_asked: int) -> None:
            if num_answered % PROGRESS_EVERY == 0 or num_answered == num_asked:
                context.progress(num_answered, num_asked, "answers", "evaluating")

        with scoring.named_mistakes(evaluation.tasks):
            tasks = scoring.load_tasks(_selection(evaluation), evaluation)
        check_loaded(tasks["tasks"].values(), context.outside, context.cache / DATASETS)
        model = scoring.LmEvalModel(await_model(), evaluation)
        answers = context.scratch / f"answers-{context.version}"
        results = scoring.evaluate_tasks(model, tasks, evaluation, answers, report)
        if model.num_asked_otherwise:
            context.warn(
                f"the server made other tokens of {model.num_asked_otherwise} questions with pictures than training "
                "would: of special tokens in their texts, or by another chat template; their scores may be too low"
            )
        if model.num_truncated:
            context.warn(
                f"{model.num_truncated} of {model.num_asked} prompts were cut at their beginning to fit into "
                f"{model.context_tokens} tokens with the answer; raise serving.max_model_len, or lower num_fewshot"
            )
        scores = {key: results[key] for key in KEPT_RESULTS if key in results}
        return Results(scores, results["samples"], {NUM_CUT: float(model.num_cut)} if model.num_cut else {})


def _selection(evaluation: Evaluation) -> TaskSelection:
    """Find the lm-eval tasks of an evaluation, and check that the recipe trusts their code. Raises EvaluationError."""
    selection = select_tasks(evaluation.tasks, evaluation.task_folder)
    if not evaluation.trust_task_code:
        check_trusted(selection)
    return selection
