"""Rehearsal of an lm-eval evaluation without a server: load the tasks, render first samples, score made-up answers.

What would fail after hours of training fails here. The imports take as long as those of `scoring`.
"""

import difflib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import lm_eval.api.metrics  # noqa: F401 (fills the registry)
from lm_eval.api.model import LM
from lm_eval.api.registry import aggregation_registry, metric_registry
from lm_eval.evaluator import evaluate

from stages.core.errors import EvaluationError, ModelError
from stages.core.redaction import quoted
from stages.data.config import DEFAULT_DATE
from stages.data.templates import ChatTemplate
from stages.data.tokenizer import DocumentTokenizer
from stages.harnesses.harness import Evaluation
from stages.harnesses.lm_eval.picture_tasks import ChatText, show_pictures
from stages.harnesses.lm_eval.scoring import MAX_SHOWN, load_tasks, named_mistakes, render_prompt
from stages.harnesses.lm_eval.tasks import TaskSelection, metrics_of_tasks
from stages.harnesses.scores import score_metrics
from stages.models.processor_files import reads_media
from stages.models.recorded import noted_date

NUM_SAMPLES = 100
"""Number of samples of each lm-eval task that are rendered to find mistakes early, which takes tenths of a second."""
MADE_UP_ANSWER = "0"
"""Made-up answer that most tasks can score, since it is a number, JSON and a word at once."""
MADE_UP_LOG_PROBABILITY = -1.0


class MadeUpModel(LM):
    """Fake model with one answer to every question, to test tasks; refuses requests that no server would take."""

    tokenizer_name = "none"
    MULTIMODAL = True

    def __init__(self, template: ChatTemplate | None) -> None:
        """Create the fake model. template: chat template of the model to evaluate; None if it is not known yet."""
        super().__init__()
        self._template = template

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        if self._template is None:
            text = "\n".join(message["content"] for message in chat_history)
        else:
            text = render_prompt(self._template, chat_history, add_generation_prompt=add_generation_prompt)
        return ChatText.of(text, chat_history, continues=not add_generation_prompt)

    def loglikelihood(self, requests: list[Any], **options: Any) -> list[tuple[float, bool]]:
        _check_texts((request.task_name, text) for request in requests for text in request.args[:2])
        return [(MADE_UP_LOG_PROBABILITY, False)] * len(requests)

    def loglikelihood_rolling(self, requests: list[Any], **options: Any) -> list[float]:
        _check_texts((request.task_name, request.args[0]) for request in requests)
        return [MADE_UP_LOG_PROBABILITY] * len(requests)

    def generate_until(self, requests: list[Any], **options: Any) -> list[str]:
        _check_texts((request.task_name, request.args[0]) for request in requests)
        for request in requests:
            _check_generation(request.task_name, request.args[1])
        return [MADE_UP_ANSWER] * len(requests)


def rehearse(selection: TaskSelection, evaluation: Evaluation, model: Path | None) -> None:
    """Load the lm-eval tasks, render their first samples, and score made-up answers, to find mistakes early.

    model: folder of the model, or of one with the same chat template, or None. Raises EvaluationError that names the
    task, TransientError for a hub that does not answer.
    """
    if selection.folder and not evaluation.trust_task_code:
        # lm-eval would look up unknown metrics on the hub, and run what it finds as code.
        for task, metrics in metrics_of_tasks(evaluation.tasks, selection.folder.path).items():
            _check_known(task, [metric for metric in metrics if metric not in metric_registry])
    with named_mistakes(selection.names):
        loaded = load_tasks(selection, evaluation)
        for name, task in loaded["tasks"].items():
            if not task.get_config("process_results"):  # which needs no functions of metrics
                functions = getattr(task, "_metric_fn_list", {})
                _check_known(name, [metric for metric, function in functions.items() if function is None])
            for metric, aggregation in getattr(task, "_aggregation_list", {}).items():
                if aggregation is None:
                    raise EvaluationError(
                        f"the task {name}: the `aggregation` of its metric {metric} is not known; lm-eval has "
                        f"{', '.join(sorted(aggregation_registry))}"
                    )
        tokenizer = _tokenizer_of(model) if model and evaluation.apply_chat_template else None
        encode = tokenizer.encode_prompt if tokenizer and model and reads_media(model) else None  # adapters have none
        show_pictures(loaded["tasks"], evaluation, lambda: encode)
        results = evaluate(
            lm=MadeUpModel(tokenizer.template if tokenizer else None),
            task_dict=loaded,
            limit=min(NUM_SAMPLES, evaluation.limit or NUM_SAMPLES),
            bootstrap_iters=0,
            apply_chat_template=evaluation.apply_chat_template,
            fewshot_as_multiturn=evaluation.apply_chat_template,
        )
    if not score_metrics(results["results"]):
        raise EvaluationError(f"the tasks {', '.join(selection.names)} give no score; name metrics in `metric_list`")


def _tokenizer_of(model: Path) -> DocumentTokenizer | None:
    """Return the model's tokenizer; None for one with its own Python code, which only the server runs."""
    try:
        return DocumentTokenizer(model, None, "all", template_date=noted_date(model) or DEFAULT_DATE)
    except ModelError:
        return None


def _check_known(task: str, unknown: list[str]) -> None:
    for metric in unknown:
        close = difflib.get_close_matches(metric, metric_registry, n=1)
        meant = f"did you mean {close[0]}?" if close else f"it has {', '.join(sorted(metric_registry))}"
        found = quoted(metric, MAX_SHOWN)
        raise EvaluationError(f"the task {task} names the metric {found}, which lm-eval does not have; {meant}")


def _check_texts(texts: Iterable[tuple[str, object]]) -> None:
    """Raise EvaluationError for prompts that are not texts. texts: pairs of a task's name and a prompt."""
    for task, text in texts:
        if not isinstance(text, str):
            raise EvaluationError(
                f"the task {task} asks with {quoted(text, MAX_SHOWN)}, expected a text; write a number of the data as "
                'a template, such as "{{answer}}"'
            )


def _check_generation(task: str, options: Mapping[str, Any]) -> None:
    """Raise EvaluationError for `generation_kwargs` of a task that every server would refuse."""
    where = f"the task {task}: generation_kwargs"
    until = options.get("until") or []
    if not (isinstance(until, str) or (isinstance(until, list) and all(isinstance(stop, str) for stop in until))):
        raise EvaluationError(f"{where}.until: found {quoted(until, MAX_SHOWN)}, expected a list of texts")
    for name, smallest in (("max_gen_toks", 1), ("temperature", 0), ("top_p", 0)):
        value = options.get(name, smallest)
        if isinstance(value, bool) or not isinstance(value, int | float) or value < smallest:
            found = quoted(value, MAX_SHOWN)
            raise EvaluationError(f"{where}.{name}: found {found}, expected a number from {smallest} on")
