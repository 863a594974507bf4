"""Documents → tokens and which of them carry loss, with the tokenizer of a model folder."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from stages.core.errors import DataError, ModelError
from stages.data.documents import Document, PlainText
from stages.data.messages import RowError
from stages.data.templates import ChatTemplate, Rendered, Span, load_chat_template


@dataclass(frozen=True)
class Tokens:
    """A tokenized document."""

    ids: NDArray[np.int32]
    """int32 [tokens]"""
    loss: NDArray[np.bool_]
    """bool [tokens]: whether the token is learned; never the first, which nothing predicts."""

    def __len__(self) -> int:
        return len(self.ids)

    def cut(self, num_tokens: int) -> Tokens:
        """Its beginning."""
        return Tokens(self.ids[:num_tokens], self.loss[:num_tokens])


class DocumentTokenizer:
    """Renders and tokenizes documents; conversations need a chat template, the recipe's or the tokenizer's."""

    def __init__(self, folder: Path, chat_template: Path | None, train_on: Literal["assistant", "all"]) -> None:
        """`folder` is a model artifact's `model/`. Raises ModelError when there is no usable tokenizer."""
        self._folder = folder
        self._chat_template = chat_template
        self._train_on = train_on
        self._tokenizer = _load(folder)
        self._backend = self._tokenizer.backend_tokenizer
        self._backend.no_truncation()
        self._backend.no_padding()
        self.teaches_to_stop: bool | None = None
        """Whether the assistant's turns end with a special token; None before the first conversation was rendered."""

    @property
    def padding_token(self) -> int:
        """An id to fill rows with; any would do, since no document attends to it and it carries no loss."""
        padding, end_of_text = self._tokenizer.pad_token_id, self._tokenizer.eos_token_id
        return next((token for token in (padding, end_of_text) if token is not None), 0)

    @cached_property
    def special_tokens(self) -> tuple[str, ...]:
        """How they are written."""
        return tuple(str(token) for token in self._tokenizer.added_tokens_decoder.values() if token.special)

    @cached_property
    def template(self) -> ChatTemplate:
        """Raises DataError when there is none."""
        return load_chat_template(self._tokenizer, self._folder, self._chat_template)

    def render(self, document: Document) -> Rendered:
        """The document's text. Raises RowError, or DataError for a missing or unsuitable chat template."""
        if isinstance(document, PlainText):
            text = document.prompt + document.completion
            begin = 0 if self._train_on == "all" else len(document.prompt)
            return Rendered(text, ((begin, len(text)),), is_plain=True)
        if self._train_on == "all":
            if document.unlearned:
                raise RowError("has a turn that is not to be learned, but `train_on: all` learns everything")
            text = self.template.render_text(document)
            rendered = Rendered(text, ((0, len(text)),))
        else:
            rendered = self.template.render(document)
        if self.teaches_to_stop is None:
            self.teaches_to_stop = self.template.ends_turns(rendered)
        return rendered

    def encode(self, documents: Sequence[Rendered]) -> list[Tokens]:
        """Tokenize many at once (in parallel threads). Raises DataError for plain text without an end-of-text token."""
        encodings = self._backend.encode_batch([document.text for document in documents], add_special_tokens=False)
        return [self._tokens(encoding, document) for encoding, document in zip(encodings, documents, strict=True)]

    def _tokens(self, encoding: Any, document: Rendered) -> Tokens:
        ids = np.array(encoding.ids, np.int32)
        loss = _loss_mask(encoding.offsets, document.spans)
        if document.is_plain:
            begin, end = self._frame
            ids = np.concatenate([begin, ids, end])
            loss = np.concatenate([np.zeros(len(begin), np.bool_), loss, np.ones(1, np.bool_)])
        loss[:1] = False
        return Tokens(ids, loss)

    @cached_property
    def _frame(self) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
        """The special tokens before a text, and the end-of-text token."""
        end = self._tokenizer.eos_token_id
        if end is None:
            raise DataError(
                f"the data are plain text, but the tokenizer in {self._folder} has no end-of-text token (`eos_token`) "
                "to end them with; add one to its tokenizer_config.json"
            )
        example = self._tokenizer("a", return_special_tokens_mask=True)
        num_special = example["special_tokens_mask"].index(0)
        return np.array(example["input_ids"][:num_special], np.int32), np.array([end], np.int32)


def _loss_mask(offsets: list[Span], spans: Sequence[Span]) -> NDArray[np.bool_]:
    """bool [tokens]: which tokens lie, at least in part, in one of the spans."""
    mask = np.zeros(len(offsets), np.bool_)
    for begin, end in spans:
        mask[bisect_right(offsets, begin, key=_end) : bisect_left(offsets, end, key=_begin)] = True
    return mask


def _begin(offset: Span) -> int:
    return offset[0]


def _end(offset: Span) -> int:
    """At least one character: some tokenizers give a token that is only a space no width."""
    return max(offset[1], offset[0] + 1)


def _load(folder: Path) -> Any:
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except (OSError, ValueError, KeyError) as error:
        raise ModelError(f"the tokenizer in {folder} cannot be loaded: {error}") from error
    if not tokenizer.is_fast:
        raise ModelError(
            f"the tokenizer in {folder} ({type(tokenizer).__name__}) does not say which characters a token stands "
            "for; convert it to a tokenizer.json"
        )
    return tokenizer
