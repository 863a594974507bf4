"""What a harness does: tasks and a served model → scores of tasks and of every sample, in one schema.

One room a harness, one line in `registry.py`. The schema is that of lm-eval's results, so that evaluations of the same
task can be paired sample by sample (`stages/promote/paired.py`), whichever harness ran them:

- scores: `results` (task → {"METRIC,FILTER": score}; the filter `none` is no filter), `configs` (task → its settings),
  `versions`, `n-shot` and `higher_is_better` (task → {metric: bool});
- samples: a row for each document and filter, with `doc_id`, `filter`, the hashes `doc_hash`, `prompt_hash` and
  `target_hash` of what was asked, and the sample's value of each metric.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from pydantic import JsonValue

from stages.core.contract import StageContext
from stages.serving.asked import ServedModel


@dataclass(frozen=True)
class Evaluation:
    """What a recipe asks of a harness.

    limit: samples of each task. num_fewshot: None leaves it to the task. seed: None leaves it to the harness.
    """

    tasks: tuple[str, ...]
    task_folder: Path | None
    limit: int | None
    num_fewshot: int | None
    apply_chat_template: bool
    seed: int | None
    trust_task_code: bool
    concurrent_requests: int


@dataclass(frozen=True)
class Results:
    """scores: what `scores.json` holds. samples: task → rows. Both as the module says."""

    scores: Mapping[str, Any]
    samples: Mapping[str, list[dict[str, Any]]]


@dataclass(frozen=True)
class TaskItem:
    """What a sample of a task says; number: its `doc_id`.

    questions: what is asked, as the task writes it and in words of the sample alone. texts: all that it holds.
    """

    task: str
    number: int
    questions: tuple[str, ...]
    texts: tuple[str, ...]


class Harness(Protocol):
    """name: in records, as `NAME_version`. title: in messages."""

    @property
    def name(self) -> str: ...
    @property
    def title(self) -> str: ...

    def version(self) -> str:
        """Of the installed harness."""

    def resolve_outside(self, evaluation: Evaluation, limit_s: float | None = None) -> dict[str, JsonValue]:
        """What else decides the scores, such as the commits of datasets.

        May ask the network; limit_s: once, for this long.

        Raises EvaluationError for tasks that do not exist, or have code that is not trusted; DownloadError or
        TransientError when a hub gives no answer.
        """

    def custom_code(self, evaluation: Evaluation) -> tuple[str, ...]:
        """What of the task folder is code that the evaluation runs; a description of each piece. Raises EvaluationError
        for tasks that do not exist.
        """

    def may_give(self, score: str, evaluation: Evaluation) -> bool:
        """Whether a task may give the score `TASK.METRIC` or `TASK.FILTER.METRIC`; True where nobody knows before."""

    def prepare(self, evaluation: Evaluation, cache: Path) -> None:
        """Check the tasks before anything slow, and set what libraries read when they are imported.

        Raises EvaluationError.
        """

    def items(self, evaluation: Evaluation, context: StageContext) -> Iterator[TaskItem]:
        """All samples of the tasks, whatever `limit` says, task by task: what no training row should hold.

        Raises EvaluationError as `prepare` does, and for samples that their task cannot write down.
        """

    def evaluate(
        self, evaluation: Evaluation, context: StageContext, await_model: Callable[[], ServedModel]
    ) -> Results:
        """Load the tasks while the server starts, call `await_model` once, ask, and score.

        Answers are kept in the context's scratch folder, so that another attempt asks only for what is missing.
        Raises EvaluationError, TransientError, and whatever a lost connection raises.
        """
