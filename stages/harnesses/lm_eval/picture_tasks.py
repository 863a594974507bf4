"""Tasks of lm-eval with media: each stands where the question has `<image>`, `<video>`, `<audio>`, or else before it.

Their columns are in `doc_to_image`, `doc_to_audio`, and, of videos, which lm-eval has no field for, in
`metadata: {doc_to_video: …}`. lm-eval itself would put all pictures first, leave out those beyond one, and send
`<image>` as words. Here it gets a prompt that knows its conversation, and digests in place of media.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import datasets
from lm_eval.api.task import ConfigurableTask

from stages.core.errors import EvaluationError
from stages.data.files import RowLocation
from stages.data.media.rows import with_media
from stages.data.messages import Conversation, Message, RowError
from stages.harnesses.harness import Evaluation
from stages.harnesses.lm_eval.tasks import GENERATES, data_files, media_columns
from stages.harnesses.pictures import (
    MEDIA,
    TEXT_ALONE,
    QuestionPictures,
    check_question,
    flat,
    recorded_media,
    without_pixels,
)
from stages.harnesses.question_sets import hashes
from stages.models.media import NOUNS


class ChatText(str):
    """Text of a rendered chat, which knows its messages. continues: whether the answer has begun in the last one."""

    messages: list[Message]
    continues: bool

    @classmethod
    def of(cls, text: str, messages: list[Message], *, continues: bool) -> ChatText:
        chat = cls(text)
        chat.messages, chat.continues = messages, continues
        return chat


class PictureQuestion(str):
    """Rendered question of a task with pictures. token_ids: as training makes them; None before the model is there."""

    conversation: Conversation
    continues: bool
    token_ids: list[int] | None

    @classmethod
    def of(cls, conversation: Conversation, encode: Encode | None, *, continues: bool) -> PictureQuestion:
        """Render a question. Raises RowError for what the template refuses, or with placeholders in its text."""
        text, token_ids = encode(conversation) if encode else (str(conversation.messages), None)
        question = cls(text)
        question.conversation, question.continues, question.token_ids = conversation, continues, token_ids
        return question


Encode = Callable[[Conversation], tuple[str, list[int]]]
"""Function that returns a conversation's text and token ids, as `DocumentTokenizer.encode_prompt`."""


@contextmanager
def encoded_rows() -> Iterator[None]:
    """Let rows of tasks that are loaded meanwhile hold media as encoded bytes or paths.

    lm-eval looks at the first row while it loads a task, and `datasets` would decode its pictures without our bounds.
    """
    download = ConfigurableTask.download

    def bounded(task: ConfigurableTask, *arguments: Any, **options: Any) -> None:
        download(task, *arguments, **options)
        keep_encoded(task)

    ConfigurableTask.download = bounded
    try:
        yield
    finally:
        ConfigurableTask.download = download


def keep_encoded(task: Any) -> None:
    """Let a task's rows hold media as encoded bytes or paths: `datasets` would decode them without our bounds."""
    for split, rows in task.dataset.items():
        for name, feature in (getattr(rows, "features", None) or {}).items():
            if (encoded := _encoded(feature)) is not feature:
                rows = rows.cast_column(name, encoded)
        task.dataset[split] = rows


def _encoded(feature: Any) -> Any:
    """Return a column's feature without decoding of media, or the feature itself if nothing is decoded."""
    if isinstance(feature, datasets.Image | datasets.Audio | datasets.Video) and feature.decode:
        return replace(feature, decode=False)
    if isinstance(feature, datasets.List | datasets.LargeList):
        encoded = _encoded(feature.feature)
        return feature if encoded is feature.feature else replace(feature, feature=encoded)
    if isinstance(feature, dict):
        fields = {name: _encoded(one) for name, one in feature.items()}
        return feature if all(fields[name] is one for name, one in feature.items()) else fields
    return feature


def show_pictures(
    tasks: Mapping[str, Any], evaluation: Evaluation, get_encode: Callable[[], Encode | None]
) -> QuestionPictures | None:
    """Let tasks with pictures ask `PictureQuestion`s; return the source of their pictures, None if no task has any.

    get_encode: gives the tokenizer of prompts, where there are pictures. Raises EvaluationError for tasks that cannot
    be asked so; they raise it themselves, naming the sample, for pictures that do not match their text, or are refused.
    """
    seeing = {name: task for name, task in tasks.items() if media_columns(task.get_config)}
    if not seeing:
        return None
    for name, task in seeing.items():
        _check(name, task, evaluation)
    files = {name: [*data_files(task.get_config, evaluation.task_folder)] for name, task in seeing.items()}
    pictures = QuestionPictures(evaluation.task_folder, [path for paths in files.values() for path in paths])
    encode = get_encode()
    for name, task in seeing.items():
        own = files[name][0] if len(files[name]) == 1 else None
        task.construct_requests = _SeeingTask(name, task, evaluation, pictures, encode, own).construct_requests
    return pictures


def _check(name: str, task: Any, evaluation: Evaluation) -> None:
    if evaluation.max_images == 0:
        raise EvaluationError(f"the task {name} {TEXT_ALONE}")
    taken = evaluation.media_kinds
    if taken is not None and (others := [kind for kind in media_columns(task.get_config) if kind not in taken]):
        raise EvaluationError(
            f"the task {name} has {NOUNS[others[0]]}s, with which the model is not served; evaluate one that learned "
            "from them (the page of serve stages names the families), or leave the task out"
        )
    if task.OUTPUT_TYPE != GENERATES:
        raise EvaluationError(
            f"the task {name} compares log-likelihoods (`output_type: {task.OUTPUT_TYPE}`), and servers give none for "
            f"questions with pictures; say `output_type: {GENERATES}`, and let the model write its choice"
        )
    if num_shots := task.get_config("num_fewshot"):
        raise EvaluationError(
            f"the task {name} has pictures and {num_shots} few-shot examples, whose pictures lm-eval leaves out; say "
            "`num_fewshot: 0` in the task"
        )
    if not evaluation.apply_chat_template:
        raise EvaluationError(
            f"the task {name} has pictures, which only a chat has a place for, and the model is asked in plain text: "
            "it was trained so, has no chat template, or the recipe says `apply_chat_template: false`"
        )


@dataclass
class _SeeingTask:
    """Task of lm-eval whose requests show pictures. file: in the task folder, with all rows; None if not known."""

    name: str
    task: Any
    evaluation: Evaluation
    pictures: QuestionPictures
    encode: Encode | None
    file: Path | None

    def __post_init__(self) -> None:
        self._construct = self.task.construct_requests

    def construct_requests(self, doc: Mapping[str, Any], ctx: ChatText, **given: Any) -> Any:
        """Construct lm-eval's request of a document as it does itself, with its question and the media's digests."""
        columns = {
            "images": [*flat(self.task.doc_to_image(doc))],
            "videos": [*flat([doc[name] for name in media_columns(self.task.get_config).get("video", ())])],
            "audios": [*flat(self.task.doc_to_audio(doc))],
        }
        question = self._question(ctx, given["metadata"][1], {name: cells for name, cells in columns.items() if cells})
        request = self._construct(doc=doc, ctx=question, **given)
        request.arguments = (
            *request.arguments[:2],
            {"visual": [one.sha256 for one in question.conversation.media]},
        )
        return request

    def _question(self, chat: ChatText, number: int, columns: Mapping[str, list[Any]]) -> PictureQuestion:
        where = f"sample {number} of the task {self.name}"
        row = None
        if self.file and self.evaluation.task_folder:
            row = RowLocation(self.file.relative_to(self.evaluation.task_folder).as_posix(), number + 1)
        try:
            (asked,) = with_media((Conversation(chat.messages),), columns, self.pictures, row)
            assert isinstance(asked, Conversation)
            check_question(asked, self.evaluation.max_images, self.evaluation.media_kinds)
            return PictureQuestion.of(asked, self.encode, continues=chat.continues)
        except RowError as error:
            raise EvaluationError(f"{where} {error}") from error


def sample_of(row: dict[str, Any]) -> dict[str, Any]:
    """Return a sample of lm-eval with references to its pictures, of which no pixel is kept.

    What was asked is hashed with the pictures' content, so that samples with other pictures are not paired.
    """
    question, *options = row["arguments"][0]
    if not isinstance(question, PictureQuestion):
        return row
    media, document = question.conversation.media, without_pixels(row["doc"])
    asked = [str(question), *(one.sha256 for one in media)]
    return {
        **row,
        "doc": document,
        "arguments": [[str(question), *options[:1]]],
        MEDIA: recorded_media(question.conversation),
        **hashes({"doc": document, "prompt": asked}),
    }
