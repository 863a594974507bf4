"""What lm-eval's tasks ask and expect, as texts: for the search of training rows that hold them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from stages.core.errors import EvaluationError
from stages.harnesses.harness import TaskItem
from stages.harnesses.lm_eval.task_file import strings_in


def items_of(tasks: Mapping[str, Any]) -> Iterator[TaskItem]:
    """tasks: lm-eval's, by name. Raises EvaluationError for a sample that its task cannot write down."""
    for name, task in tasks.items():
        for number, document in enumerate(task.eval_docs):
            try:
                yield _item(name, number, task, document)
            except Exception as error:
                raise EvaluationError(
                    f"reading sample {number} of the task {name}: {type(error).__name__}: {error}; mend the task, or "
                    "leave it out"
                ) from error


def _item(name: str, number: int, task: Any, document: dict[str, Any]) -> TaskItem:
    """What is asked: the question as the task writes it, alone and with its answer, and each text in it."""
    choices = task.doc_to_choice(document) if task.OUTPUT_TYPE == "multiple_choice" else []
    question, answers = _chosen(task.doc_to_text(document), choices), task.doc_to_target(document)
    answers = [_chosen(one, choices) for one in (answers if isinstance(answers, list) else [answers])]
    texts = list(strings_in(document))
    within = [text for text in texts if text.strip() and text in question]
    questions = dict.fromkeys([question, *(f"{question} {answer}" for answer in answers), *within])
    return TaskItem(name, number, tuple(questions), tuple(texts))


def _chosen(value: object, choices: list[str]) -> str:
    """Where a task has the number of a choice, the choice."""
    if isinstance(value, int) and 0 <= value < len(choices):
        return str(choices[value])
    return str(value)
