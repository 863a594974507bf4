"""Question sets, the user's own benchmarks: files `TASK.jsonl` in a folder, with one question per row.

From rows as of `stages/data/any_rows.py` come plain questions, right answers, and hashes to pair two evaluations by.
"""

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any, Protocol

from pydantic import JsonValue

from stages.core.contract import StageContext
from stages.core.errors import DataError, EvaluationError
from stages.data.any_rows import Prompt, PromptReader
from stages.data.files import BadRow, Portion, find_files, read_rows
from stages.data.messages import Conversation, Document, Message, PlainText, RowError
from stages.harnesses.harness import Evaluation, Harness, TaskItem
from stages.harnesses.pictures import (
    MEDIA,
    QuestionPictures,
    check_question,
    media_of,
    recorded_media,
    without_pixels,
)
from stages.rollouts.options import PromptOptions, SamplingOptions


def read_questions(evaluation: Evaluation, task: str) -> Iterator[Prompt]:
    """Yield a set's questions, up to `limit`; raise EvaluationError for a missing file and for a bad row."""
    folder = question_folder(evaluation)
    try:
        files = find_files(folder, task)
        reader = PromptReader(None, media=QuestionPictures(folder, files))
        for row in islice(read_rows(folder, files), evaluation.limit):
            if isinstance(row, BadRow):
                raise EvaluationError(f"reading the questions of {task}: {row.place} {row.reason}; fix it")
            try:
                prompt = reader.read(row.content, row.place)
                if isinstance(prompt.document, Conversation) and prompt.document.media:
                    check_question(prompt.document, evaluation.max_images)
                yield prompt
            except RowError as error:
                raise EvaluationError(f"reading the questions of {task}: {row.place} {error}; fix it") from error
    except DataError as error:
        raise EvaluationError(f"reading the questions of {task}: {error}") from error


def prompt_options(evaluation: Evaluation, task: str) -> PromptOptions:
    """Return the options of making prompts of a set's questions, which no reward judges."""
    return PromptOptions(
        portion=Portion("evaluation", task),
        limit=evaluation.limit,
        reference=None,
        reference_field="reference",
        system=None,
        apply_chat_template=evaluation.apply_chat_template,
        rewards={},
    )


def sampling_options(evaluation: Evaluation, num_samples: int, seed: int) -> SamplingOptions:
    """Return the options of sampling answers to questions, as the recipe's `generation` says."""
    generation = evaluation.generation
    return SamplingOptions(
        num_samples=num_samples,
        max_tokens=generation.max_tokens,
        temperature=generation.temperature,
        top_p=1.0,
        stop=generation.stop,
        seed=seed,
        concurrent_requests=evaluation.concurrent_requests,
    )


def question_folder(evaluation: Evaluation) -> Path:
    """Return the recipe's folder of question sets. Raises EvaluationError if the recipe names none."""
    if evaluation.task_folder is None:
        raise EvaluationError("there are no question sets: name their folder as `task_folder`")
    return evaluation.task_folder


def question_sets(evaluation: Evaluation) -> list[str]:
    """Return those of an evaluation's tasks that are question sets: files in the task folder."""
    folder = evaluation.task_folder
    return [task for task in evaluation.tasks if folder and (folder / f"{task}.jsonl").is_file()]


class QuestionSetHarness(Harness, Protocol):
    """Base class of harnesses whose tasks are question sets, which have no code, log-likelihoods or data on a hub."""

    def resolve_outside(self, evaluation: Evaluation, limit_s: float | None = None) -> dict[str, JsonValue]:
        return {}

    def custom_code(self, evaluation: Evaluation) -> tuple[str, ...]:
        return ()

    def log_likelihood_tasks(self, evaluation: Evaluation) -> list[str]:
        return []

    def question_problems(self, evaluation: Evaluation) -> Iterator[str]:
        return iter(())

    def check(self, evaluation: Evaluation, cache: Path, model: Path | None, base: Path | None = None) -> str | None:
        self.prepare(evaluation, cache)
        return None

    def items(self, evaluation: Evaluation, context: StageContext) -> Iterator[TaskItem]:
        for task in evaluation.tasks:
            for number, prompt in enumerate(read_questions(replace(evaluation, limit=None), task)):
                asked = question_text(prompt.document)
                answers = [] if prompt.reference is None else [prompt.reference]
                yield TaskItem(task, number, (asked, *(f"{asked} {answer}" for answer in answers)), (asked, *answers))


def question_text(document: Document) -> str:
    """Return a question as plain text, without the special tokens of any model; `<image>` stands for a picture."""
    if isinstance(document, PlainText):
        return document.prompt
    if len(document.messages) == 1:
        return _text(document.messages[0])
    return "\n\n".join(f"{message['role']}: {_text(message)}" for message in document.messages)


def _text(message: Message) -> str:
    content = message["content"]
    if not isinstance(content, list):
        return str(content)
    return "".join(part["text"] if part["type"] == "text" else f"<{part['type']}>" for part in content)


def asked_hashes(prompt: Prompt) -> dict[str, str]:
    """Return hashes of a question's row, prompt and right answer, whatever the chat template, to match samples.

    Pictures count by their content.
    """
    media = media_of(prompt.document)
    texts = {
        "doc": json.dumps(without_pixels(prompt.row) if media else prompt.row, sort_keys=True),
        "prompt": "\n".join([question_text(prompt.document), *(one.sha256 for one in media)]),
        "target": prompt.reference or "",
    }
    return _hashes(texts)


def hashes(asked: Mapping[str, Any]) -> dict[str, str]:
    """Return hashes of JSON values in the form of a sample's: `doc` becomes `doc_hash`."""
    return _hashes({name: json.dumps(value, sort_keys=True, default=str) for name, value in asked.items()})


def _hashes(texts: Mapping[str, str]) -> dict[str, str]:
    return {f"{name}_hash": hashlib.sha256(text.encode()).hexdigest() for name, text in texts.items()}


def sample_row(number: int, prompt: Prompt, answer: str, scores: dict[str, Any]) -> dict[str, Any]:
    """Return a sample as a row of `samples/TASK.jsonl`. scores: values of metrics, and other fields to keep."""
    return {"doc_id": number, "filter": "none", "resps": [[answer]], **asked_row(prompt), **scores}


def asked_row(prompt: Prompt) -> dict[str, Any]:
    """Return the fields of a sample's row that say what was asked."""
    media = recorded_media(prompt.document)
    return {
        "doc": without_pixels(prompt.row) if media else prompt.row,
        "question": question_text(prompt.document),
        "target": prompt.reference,
        **({MEDIA: media} if media else {}),
        **asked_hashes(prompt),
    }
