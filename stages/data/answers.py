"""Answers that teach nothing but special tokens, and tokens that the model has no embedding for."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from pathlib import Path

from stages.core.redaction import quoted
from stages.data.documents import Document, answers_of
from stages.data.messages import INVISIBLE, RowError
from stages.data.units import Unit


class AnswerCheck:
    """Refuses rows whose answers are no text, or have tokens that the model has not."""

    def __init__(self, special_tokens: Sequence[str], vocabulary_size: int | None) -> None:
        """special_tokens: as the tokenizer writes them. vocabulary_size: the model's; None where it is not known."""
        written = [
            r"\s",
            INVISIBLE,
            *(re.escape(token) for token in sorted(special_tokens, key=len, reverse=True) if token),
        ]
        self._no_text = re.compile(f"(?:{'|'.join(written)})*+")
        self._vocabulary_size = vocabulary_size

    def check_text(self, documents: Iterable[Document]) -> None:
        """Raises RowError for an answer that is nothing but special tokens, such as padding."""
        for answer in (answer for document in documents for answer in answers_of(document)):
            if self._no_text.fullmatch(answer):
                raise RowError(
                    f"has the answer {quoted(answer, 40)}, nothing but special tokens or invisible characters; "
                    "expected text"
                )

    def check_tokens(self, unit: Unit) -> None:
        """Raises RowError for a token that the model has no embedding for."""
        largest = max(int(document.ids.max(initial=0)) for document in unit.documents)
        if self._vocabulary_size is not None and largest >= self._vocabulary_size:
            raise RowError(
                f"has the token {largest}, but the model's vocabulary ends at {self._vocabulary_size - 1}; expected "
                "the tokenizer that the model was trained with"
            )


def vocabulary_size(model_folder: Path) -> int | None:
    """What the model's config says, also of the text part of a model for more; None where it says nothing."""
    try:
        config = json.loads((model_folder / "config.json").read_bytes())
    except (OSError, ValueError):
        return None
    sizes = [part.get("vocab_size") for part in (config, config.get("text_config")) if isinstance(part, dict)]
    return next((size for size in sizes if isinstance(size, int)), None)
