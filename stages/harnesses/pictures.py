"""Media of an evaluation's questions: found and checked as those of training, sent inside of requests, never stored.

Samples keep references (`media`: path in the task folder, digest, size), and digests where a row held them itself.
"""

import io
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from stages.core.contract import StageInput
from stages.core.errors import DataError, EvaluationError
from stages.data.files import RowLocation
from stages.data.media import embedded
from stages.data.media.addresses import FORMS
from stages.data.media.embedded import embedded_bytes
from stages.data.media.folder import MediaFolder
from stages.data.media.requests import openai_messages
from stages.data.media.rows import TAG, with_media
from stages.data.media_reference import MediaKind, MediaReference
from stages.data.messages import Conversation, Document, PlainText, RowError, make_message, texts_of
from stages.models.media import NOUNS, SHOWN_TO_ANY

Address = Callable[[MediaReference], str]
"""Function that returns a picture's `data:` address."""
MEDIA = "media"
"""Field of a sample with the references of its pictures, in their order."""
TEXT_ALONE = (
    "has pictures, and the model reads text alone (its folder has no processor of pictures); evaluate a model that "
    "sees, or leave the task out"
)


class QuestionPictures:
    """Source of the pictures of questions; implements `MediaSource`.

    Pictures inside of a row are read there again when they are sent, or kept if the row cannot be found.
    """

    def __init__(self, folder: Path | None, files: Sequence[Path] = ()) -> None:
        """Look for pictures in a task folder and beside its files; without one, rows must hold their bytes."""
        self._folder = MediaFolder.of(folder or Path("/dev/null"), files)
        self._kept: dict[str, bytes] = {}

    def reference(self, kind: MediaKind, source: object, row: RowLocation | None) -> MediaReference:
        """Return a picture's reference; raise RowError as `MediaFolder.reference`. source: as there, or a PIL image."""
        source = _encoded(source)
        reference = self._folder.reference(kind, source, row)
        data = embedded_bytes(source)
        if data is None or (row and self._is_there(reference)):
            return reference
        # A task may choose among the rows of its file, or change their order.
        self._kept[reference.sha256] = data
        return replace(reference, path="")

    def messages(self, conversation: Conversation) -> list[dict[str, Any]]:
        """Return a conversation in the form of OpenAI's API. Raises DataError for a picture that is gone."""
        return openai_messages(conversation, self.data_address)

    def _is_there(self, reference: MediaReference) -> bool:
        try:
            return bool(self._folder.encoded(reference))
        except DataError:
            return False

    def data_address(self, reference: MediaReference) -> str:
        """Return a medium as a `data:` address: a picture's as it is seen, else the file's, which servers measure."""
        data = self._kept.get(reference.sha256) if not reference.path else None
        return FORMS[reference.kind].address(self._folder.encoded(reference) if data is None else data)


def task_folder_of(evaluation: Path) -> Path | None:
    """Return the folder of an evaluation's tasks, with the pictures of its questions; None if none is recorded."""
    recorded = StageInput.read_or_none(evaluation / "config.json")
    named = recorded.config.get("task_folder") if recorded else None
    return Path(named) if isinstance(named, str) else None


class _RecordedPictures:
    """Source of pictures whose references a sample has; implements `MediaSource`."""

    def __init__(self, folder: Path) -> None:
        self.data_address = MediaFolder.of(folder, ()).data_address

    def reference(self, kind: MediaKind, source: object, row: RowLocation | None) -> MediaReference:
        assert isinstance(source, MediaReference)
        return source


def recorded_question(sample: Mapping[str, Any], evaluation: Path) -> tuple[Document, Address | None]:
    """Return the question of a question set's sample, and the function that gives the addresses of its pictures.

    evaluation: artifact with the sample. Raises EvaluationError for pictures whose folder it does not name.
    """
    text = sample["question"]
    if not sample.get(MEDIA):
        return PlainText(text, ""), None
    folder = task_folder_of(evaluation)
    if folder is None:
        raise EvaluationError(f"reading the pictures of {evaluation.name}: it does not say in which folder they are")
    pictures = _RecordedPictures(folder)
    media = [MediaReference(**one) for one in sample[MEDIA]]
    if other := next((one.kind for one in media if one.kind not in SHOWN_TO_ANY), None):
        raise EvaluationError(f"a question of {evaluation.name} has a {NOUNS[other]}, and judges see pictures alone")
    columns = {"images": media}
    (asked,) = with_media((Conversation([make_message("user", text)]),), columns, pictures)
    return asked, pictures.data_address


def check_question(
    asked: Conversation, max_images: int | None, kinds: Collection[MediaKind] | None = SHOWN_TO_ANY
) -> None:
    """Raise RowError for a kind that a server does not take, more of one than it takes, or a tag without a medium.

    max_images, kinds: None if not known yet.
    """
    counts = Counter(medium.kind for medium in asked.media)
    if kinds is not None and (others := [kind for kind in counts if kind not in kinds]):
        taken = " and ".join(f"{NOUNS[kind]}s" for kind in kinds) or "no media"
        raise RowError(f"has {others[0]}, and {taken} are asked about; leave it out, or see the page of serve stages")
    tags = (TAG.search(text) for message in asked.messages for text in texts_of(message))
    if left := next((tag[0] for tag in tags if tag), None):
        raise RowError(f"has `{left}` in its text, and no such medium; expected one for each, or no tag")
    if max_images is not None:
        check_numbers(counts, max_images)


def check_numbers(counts: Mapping[MediaKind, int], max_images: int) -> None:
    """Raise RowError for a question with more media of a kind than a server takes. counts: of its media."""
    for kind, number in counts.items():
        if number and not max_images:
            raise RowError(TEXT_ALONE)
        if number > max_images:
            raise RowError(
                f"has {number} {NOUNS[kind]}s, and the server takes at most {max_images} in one request; raise "
                "`serving.max_images`"
            )


def flat(cells: Any) -> Iterator[Any]:
    """Yield what a task has for a question: one medium, several, or columns of several; None is none."""
    if isinstance(cells, list | tuple):
        for cell in cells:
            yield from flat(cell)
    elif cells is not None:
        yield cells


def media_of(question: Document) -> tuple[MediaReference, ...]:
    """Return the references of a question's media; none for plain text."""
    return () if isinstance(question, PlainText) else question.media


def recorded_media(question: Document) -> list[dict[str, Any]]:
    """Return the references of a question's pictures as a sample keeps them."""
    return [{**vars(one)} for one in media_of(question)]


def without_pixels(value: Any) -> Any:
    """Return a sample's value with a digest, `sha256:…`, in place of each picture that it holds, also as PIL's."""
    if isinstance(value, dict):
        return {name: without_pixels(one) for name, one in value.items()}
    if isinstance(value, list | tuple):
        return [without_pixels(one) for one in value]
    return embedded.without_pixels(_encoded(value))


def _encoded(source: object) -> object:
    """Return the bytes of a picture that PIL holds, as PNG; anything else as it is."""
    if not hasattr(source, "save") or not hasattr(source, "getbands"):
        return source
    out = io.BytesIO()
    source.save(out, "PNG")
    return {"bytes": out.getvalue(), "path": None}
