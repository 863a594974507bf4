"""Tokenizer of a model folder, which turns documents into token ids and a mask of the tokens with loss.

A question that holds `<|im_end|><|im_start|>system` would end its own turn and begin another. So what people wrote is
shielded before a template puts it between real special tokens: the characters of each special token in it move to a
private plane of Unicode, where no template and no tokenizer knows them, and lengths stay the same.

Turns are proved on the text as the template writes it, with one placeholder for each medium; then the model's processor
says what takes their places, and the spans move.
"""

from __future__ import annotations

import re
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import date
from functools import cached_property
from itertools import islice, takewhile
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field
from tokenizers import AddedToken, Tokenizer

from stages.core.errors import DataError, ModelError
from stages.core.fields import StrictModel
from stages.core.lines import counted
from stages.core.redaction import quoted
from stages.data.config import DEFAULT_DATE, SpecialTokensPolicy
from stages.data.media.expansion import expanded
from stages.data.media_reference import MediaReference
from stages.data.messages import Conversation, Document, PlainText, RowError, Span, listed
from stages.data.templates import ChatTemplate, Rendered, Work, load_chat_template
from stages.models.loading import load_tokenizer
from stages.models.recorded import ToolPrompt
from stages.models.tokenizer_check import LengthGrowth

if TYPE_CHECKING:
    from stages.models.processor import MediaProcessor

EXAMPLES = "a0."
"""Sample texts to find the special tokens around a text; the first that the normalizer does not lengthen is used."""
PRIVATE_PLANE = 0x100000
PRIVATE = re.compile(f"[{chr(PRIVATE_PLANE)}-{chr(PRIVATE_PLANE + 0xFFFD)}]+")
THOUGHT_TAGS = ("<think>", "</think>", "[THINK]", "[/THINK]")
"""Tags around a model's reasoning, which stay special tokens in texts because chat templates search for them."""
BATCH_CHARACTERS = 1 << 20
"""Number of characters tokenized at a time. It bounds memory, since each token takes some 100 bytes meanwhile."""
MAX_SHOWN = 40
"""Largest number of characters of a template's own text that a warning quotes."""


class DocumentTokenizer:
    """Tokenizer of documents, which renders conversations with the chat template of the recipe or the model."""

    def __init__(
        self,
        folder: Path,
        chat_template: Path | None,
        train_on: Literal["assistant", "all"],
        *,
        turns: Literal["together", "separately"] = "together",
        template_date: date = DEFAULT_DATE,
        special_tokens_in_content: SpecialTokensPolicy = "text",
        processor_folder: Path | None = None,
    ) -> None:
        """Load the tokenizer of a model folder (an artifact's `model/`). Raises ModelError if none is usable.

        processor_folder: of the model that reads the media; default: the tokenizer's.
        """
        self._folder = folder
        self._processor_folder = processor_folder or folder
        self._chat_template = chat_template
        self._train_on = train_on
        self._turns = turns
        self._template_date = template_date
        self._tokenizer = _picklable(folder)
        self._backend = self._tokenizer.backend_tokenizer
        self._content = SpecialTokens(self._backend, special_tokens_in_content)
        self._growth = LengthGrowth.of(self._backend)
        self.teaches_to_stop: bool | None = None
        """True if assistant turns end with a special token, so that the model learns to stop; None before any."""

    def __getstate__(self) -> dict[str, Any]:
        """Return the state to pickle, without template and processor, which the receiving process loads again."""
        return {name: value for name, value in vars(self).items() if name not in ("template", "processor")}

    @property
    def padding_token(self) -> int:
        """Token id that fills up rows; any would do, since padding carries no loss and no document attends to it."""
        padding, end_of_text = self._tokenizer.pad_token_id, self._tokenizer.eos_token_id
        return next((token for token in (padding, end_of_text) if token is not None), 0)

    @cached_property
    def special_tokens(self) -> tuple[str, ...]:
        return tuple(str(token) for token in self._tokenizer.added_tokens_decoder.values() if token.special)

    @cached_property
    def special_ids(self) -> frozenset[int]:
        return frozenset(number for number, token in self._tokenizer.added_tokens_decoder.items() if token.special)

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text that token ids stand for, with special tokens written out."""
        return str(self._backend.decode(list(ids), skip_special_tokens=False))

    @cached_property
    def template(self) -> ChatTemplate:
        """Chat template of the recipe, or else of the model. Raises DataError when there is none."""
        return load_chat_template(self._tokenizer, self._folder, self._chat_template, self._template_date)

    @cached_property
    def processor(self) -> MediaProcessor:
        """Processor of the model's media. Raises ModelError if there is none, or it cannot be used."""
        from stages.models.processor import needed_processor  # not for texts

        return needed_processor(self._processor_folder)

    @property
    def template_cpu_s(self) -> float:
        """CPU seconds that the process for chat templates has used so far."""
        template = self.__dict__.get("template")
        return template.cpu_s if template else 0.0

    def render_rows(self, rows: Sequence[Sequence[Document]]) -> Iterator[list[tuple[Rendered, ...]] | RowError]:
        """Yield each row's rendered texts, grouped by training unit (document or preference pair), or its RowError.

        Raises DataError for a missing or unsuitable chat template, at the row where it shows.
        """
        outcomes = self._rendered([(document, len(row) > 1) for row in rows for document in row])
        for row in rows:
            texts = []
            error: RowError | None = None
            # The first error is the row's. Its other outcomes are taken all the same, so that the next row gets its
            # own.
            for outcome in islice(outcomes, len(row)):
                if isinstance(outcome, RowError):
                    error = error or outcome
                else:
                    texts.append(outcome)
            if error:
                yield error
            else:
                # A pair is one unit of two texts; each text of a single document is a unit of its own.
                yield [tuple(text for (text,) in texts)] if len(row) > 1 else [(text,) for text in texts[0]]

    def render_units(self, documents: Sequence[Document]) -> list[tuple[Rendered, ...]]:
        """Return one row's rendered texts by training unit (document or pair); raise RowError, DataError."""
        (units,) = self.render_rows([documents])
        if isinstance(units, RowError):
            raise units
        return units

    def render(self, document: Document) -> Rendered:
        """Return a document as one text; raise RowError if it needs several, DataError for no suitable template."""
        (outcome,) = self._rendered([(document, True)])
        if isinstance(outcome, RowError):
            raise outcome
        return outcome[0]

    def take_notes(self) -> TokenizerNotes:
        """Return and clear the counts collected while rendering documents, from which warnings are made."""
        template = self.__dict__.get("template")
        learns_turns = self._train_on == "assistant" and self.teaches_to_stop is not None
        notes = TokenizerNotes(
            teaches_to_stop=self.teaches_to_stop,
            special_tokens=dict(self._content.counts),
            num_dropped_thoughts=template.num_dropped_thoughts if template else 0,
            wrote_date=template.wrote_date if template else False,
            learned_after_turns=self.template.learned_after_turns if learns_turns else "",
        )
        self.teaches_to_stop = None
        self._content.counts.clear()
        if template:
            template.forget()
        return notes

    def warnings(self, notes: TokenizerNotes) -> Iterator[str]:
        """Yield warnings about special tokens in texts, dropped reasoning and dates, from the counts of rendering."""
        if warning := self._content.warning(notes.special_tokens):
            yield warning
        if notes.num_dropped_thoughts:
            yield (
                f"{notes.num_dropped_thoughts} turns are learned without their thoughts, which the chat "
                "template drops once others follow; `turns: separately` learns them"
            )
        if notes.learned_after_turns:
            yield (
                f"the last turn of a conversation is learned with {quoted(notes.learned_after_turns, MAX_SHOWN)} after "
                "the end that all turns have: the chat template writes it there, and TRL learns it too"
            )
        if notes.wrote_date and self._template_date == DEFAULT_DATE:
            yield (
                f"the chat template writes the current date, for which {DEFAULT_DATE} stands in every run; "
                "`template_date` names another"
            )

    def encode_prompt(self, document: Document) -> tuple[str, list[int]]:
        """Return a prompt's text and token ids, which end where the model's answer begins; raise as `render`.

        A plain text's prompt follows the special tokens that begin a text. Media are placeholders in the text alone.
        """
        if isinstance(document, PlainText):
            text = self._content.shield(self._unframed(document).prompt)
            begin = self._tokenizer.beginning
        else:
            text = self.template.render_text(self._shielded(document), add_generation_prompt=True)
            begin = ()
        self._check_growth(text)
        whole = text
        if isinstance(document, Conversation) and document.media:
            whole = expanded(Rendered(text, ()), document, self.processor).text
        return self._content.unshielded(text), [*begin, *self._content.encode(whole)[0]]

    def unexpanded(self, question: Conversation) -> list[int]:
        """Return a prompt's token ids as `encode_prompt` does, with one placeholder in place of each picture's."""
        text = self.template.render_text(self._shielded(question), add_generation_prompt=True)
        return self._content.encode(text)[0]

    def tool_prompt(self, question: Conversation, learned: Sequence[int]) -> ToolPrompt | None:
        """Return a sample prompt with tools or media and its token ids in training, to compare with a server's.

        None for what no server renders to the same tokens: special tokens within texts, and today's date. Raises as
        `render`.
        """
        if self._shielded(question) is not question:
            return None
        text = self.template.render_text(question, add_generation_prompt=True)
        if self.template.wrote_date:
            return None
        if question.media:
            text = expanded(Rendered(text, ()), question, self.processor).text
        num_tokens = len(self._content.encode(text)[0])
        return ToolPrompt(
            messages=question.messages,
            tools=list(question.tools),
            variables=question.variables,
            token_ids=[int(token) for token in learned[:num_tokens]],
        )

    def encode(self, documents: Sequence[Rendered]) -> list[TokenizedDocument]:
        """Return token ids and loss masks of many texts, tokenized in parallel threads.

        Raises DataError for plain text without an end-of-text token, and where the tokenizer fails.
        """
        tokens: list[TokenizedDocument] = []
        begin = num_characters = 0
        for end, document in enumerate(documents, 1):
            num_characters += len(document.text)
            if num_characters > BATCH_CHARACTERS or end == len(documents):
                tokens += self._encoded(documents[begin:end])
                begin, num_characters = end, 0
        return tokens

    def _encoded(self, documents: Sequence[Rendered]) -> list[TokenizedDocument]:
        # Shielded texts go to another backend (`SpecialTokens.encode`); an empty text holds their place here.
        texts = ["" if document.is_shielded else document.text for document in documents]
        try:
            encodings = self._backend.encode_batch(texts, add_special_tokens=False)
            return [
                self._tokens(*self._content.encode(document.text), document)
                if document.is_shielded
                else self._tokens(encoding.ids, encoding.offsets, document)
                for encoding, document in zip(encodings, documents, strict=True)
            ]
        except BaseException as error:
            if type(error).__name__ != "PanicException":  # of the library, for a pattern that takes too many steps
                raise
            raise TokenizerError(
                f"the tokenizer in {self._folder} fails on a text: {quoted(str(error), 200)}; use another tokenizer"
            ) from error

    def num_bytes(self, text: Rendered) -> int:
        """Return the number of UTF-8 bytes of a rendered text, with special tokens as users wrote them."""
        return len(self._content.unshielded(text.text).encode())

    def _rendered(self, documents: Sequence[tuple[Document, bool]]) -> Iterator[tuple[Rendered, ...] | RowError]:
        """Yield each document's rendered texts, or a RowError; one given with True must give exactly one text."""
        prepared = [self._prepared(document, as_one) for document, as_one in documents]
        asked = [ready for ready in prepared if isinstance(ready, _RenderRequest)]
        answers = self.template.rendered([(ready.work, ready.conversation) for ready in asked]) if asked else iter(())
        for ready, (_, as_one) in zip(prepared, documents, strict=True):
            outcome = next(answers) if isinstance(ready, _RenderRequest) else ready
            try:
                if isinstance(outcome, RowError):
                    raise outcome
                if isinstance(ready, _RenderRequest):
                    texts = (self.template.as_one(outcome),) if as_one else outcome
                    outcome = tuple(self._noted(text, is_shielded=ready.is_shielded) for text in texts)
                    if ready.conversation.media:
                        outcome = tuple(expanded(text, ready.conversation, self.processor) for text in outcome)
                for rendered in outcome:
                    self._check_growth(rendered.text)
            except RowError as error:
                outcome = error
            yield outcome

    def _prepared(self, document: Document, as_one: bool) -> _RenderRequest | tuple[Rendered] | RowError:
        """Return a request to render a conversation, or a plain document's final text, or an error for a bad row."""
        try:
            if isinstance(document, PlainText):
                return (self._render_plain(self._unframed(document)),)
            shielded = self._shielded(document)
        except RowError as error:
            return error
        if self._train_on == "all" and shielded.unlearned:
            return RowError("has a turn that is not to be learned, but `train_on: all` learns everything")
        work: Work = "text" if self._train_on == "all" else "together" if as_one else self._turns
        return _RenderRequest(work, shielded, is_shielded=shielded is not document)

    def _check_growth(self, text: str) -> None:
        """Raise RowError for a text that the tokenizer's normalizer would make too long."""
        if problem := self._growth.problem(text):
            raise RowError(f"cannot be tokenized: the model's tokenizer {problem}")

    def _noted(self, rendered: Rendered, *, is_shielded: bool) -> Rendered:
        if self.teaches_to_stop is None:
            self.teaches_to_stop = self.template.ends_turns(rendered)
        return replace(rendered, is_shielded=True) if is_shielded else rendered

    def _shielded(self, conversation: Conversation) -> Conversation:
        """Return a conversation with the special tokens in users' texts replaced by private-use characters."""
        parts = [conversation.messages, conversation.tools, conversation.variables]
        messages, tools, variables = found = self._content.shield(parts)
        if found is parts:
            return conversation
        return replace(conversation, messages=messages, tools=tuple(tools), variables=variables)

    def _render_plain(self, document: PlainText) -> Rendered:
        parts = [document.prompt, document.completion]
        prompt, completion = shielded = self._content.shield(parts)
        begin = 0 if self._train_on == "all" else len(prompt)
        text = prompt + completion
        return Rendered(text, ((begin, len(text)),), is_plain=True, is_shielded=shielded is not parts)

    def _unframed(self, text: PlainText) -> PlainText:
        """Return a plain text without the begin and end tokens that the tokenizer will add itself."""
        prompt, completion = text.prompt, text.completion
        begin, end = self._tokenizer.bos_token, self._tokenizer.eos_token
        begins_so = self._tokenizer.bos_token_id in self._tokenizer.beginning
        if end and completion.rstrip().endswith(end):
            completion = completion.rstrip().removesuffix(end)
        if begin and begins_so and (prompt or completion).startswith(begin):
            prompt, completion = (prompt.removeprefix(begin), completion) if prompt else ("", completion[len(begin) :])
        return PlainText(prompt, completion)

    def _tokens(self, token_ids: list[int], offsets: list[Span], document: Rendered) -> TokenizedDocument:
        ids = np.array(token_ids, np.int32)
        loss = _loss_mask(offsets, document.spans)
        if document.is_plain:
            begin, end = self._frame
            ids = np.concatenate([begin, ids, end])
            # The end-of-text token is learned, the tokens before the text are not.
            loss = np.concatenate([np.zeros(len(begin), np.bool_), loss, np.ones(1, np.bool_)])
        # No token comes before the first one, so nothing predicts it.
        loss[:1] = False
        if not document.media:
            return TokenizedDocument(ids, loss)
        inserted = _loss_mask(offsets, document.inserted)
        return TokenizedDocument(ids, loss & ~inserted, document.media, int(inserted.nonzero()[0][-1]) + 1)

    @cached_property
    def _frame(self) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
        """Token ids that the tokenizer puts before a plain text, and its end-of-text token."""
        end = self._tokenizer.eos_token_id
        if end is None:
            raise DataError(
                f"the data are plain text, but the tokenizer in {self._folder} has no end-of-text token (`eos_token`) "
                "to end them with; add one to its tokenizer_config.json"
            )
        return np.array(self._tokenizer.beginning, np.int32), np.array([end], np.int32)


@dataclass(frozen=True)
class TokenizedDocument:
    """Tokenized document: token ids with a mask of the tokens that carry loss."""

    ids: NDArray[np.int32]
    loss: NDArray[np.bool_]
    """Loss mask, bool [tokens]; the first token never carries loss, since nothing predicts it."""
    media: tuple[MediaReference, ...] = ()
    media_end: int = 0
    """Number of tokens up to the end of the last medium; 0 without media."""

    def __len__(self) -> int:
        return len(self.ids)

    def cut(self, num_tokens: int) -> TokenizedDocument:
        return replace(self, ids=self.ids[:num_tokens], loss=self.loss[:num_tokens])


class TokenizerNotes(StrictModel):
    """Counts about rendered documents (special tokens in texts, dropped reasoning, …), from which warnings are made.

    teaches_to_stop: whether turns end with a special token, by the first conversation. special_tokens: documents per
    special token within texts. learned_after_turns: text learned after the end of a conversation's last turn.
    """

    teaches_to_stop: bool | None = None
    special_tokens: dict[str, int] = Field(default_factory=dict)
    num_dropped_thoughts: int = 0
    wrote_date: bool = False
    learned_after_turns: str = ""

    def then(self, later: TokenizerNotes) -> TokenizerNotes:
        """Merge the counts of documents rendered earlier (this object) and later, and return the result."""
        first = self.teaches_to_stop
        return TokenizerNotes(
            teaches_to_stop=later.teaches_to_stop if first is None else first,
            special_tokens=dict(Counter(self.special_tokens) + Counter(later.special_tokens)),
            num_dropped_thoughts=self.num_dropped_thoughts + later.num_dropped_thoughts,
            wrote_date=self.wrote_date or later.wrote_date,
            learned_after_turns=self.learned_after_turns or later.learned_after_turns,
        )


class TokenizerError(DataError):
    """Raised when the tokenizer library fails on a text."""


@dataclass(frozen=True)
class _RenderRequest:
    """Request to render a conversation by the chat template. is_shielded: some special tokens were replaced."""

    work: Work
    conversation: Conversation
    is_shielded: bool


def _loss_mask(offsets: list[Span], spans: Sequence[Span]) -> NDArray[np.bool_]:
    """Return a mask of the tokens that lie, at least partly, in one of the spans with loss: bool [tokens]."""
    mask = np.zeros(len(offsets), np.bool_)
    for begin, end in spans:
        # From the first token that ends after `begin` to the last one that begins before `end`.
        mask[bisect_right(offsets, begin, key=_end) : bisect_left(offsets, end, key=itemgetter(0))] = True
    return mask


def _end(offset: Span) -> int:
    """Return the end of a token's span in the text; an empty span counts as one character long."""
    return max(offset[1], offset[0] + 1)


class SpecialTokens:
    """Guard against special tokens in users' texts, such as `<|im_end|>`: moves them to private characters."""

    def __init__(self, backend: Tokenizer, policy: SpecialTokensPolicy) -> None:
        self._backend = backend
        self._policy = policy
        self._tokens = {number: token for number, token in backend.get_added_tokens_decoder().items() if token.special}
        # Longest first: a pattern takes the first alternative that matches, not the longest.
        contents = sorted((token.content for token in self._tokens.values()), key=len, reverse=True)
        self._in_texts = _any_of([content for content in contents if content not in THOUGHT_TAGS])
        self._real_or_shielded = re.compile(f"{_any_of(contents).pattern}|{PRIVATE.pattern}")
        self.counts: Counter[str] = Counter()

    def shield(self, value: Any) -> Any:
        """Replace special tokens in all strings of a value by private-use characters; return the same object if none.

        Raises RowError when the policy refuses special tokens.
        """
        texts: list[str] = []
        _collect_texts(value, texts)
        special = {token for text in texts for token in self._in_texts.findall(text)}
        self.counts.update(special)
        if not special or self._policy == "allow":
            return value
        if self._policy == "refuse":
            raise RowError(
                f"has {listed(sorted(special))} in its text, which would be special tokens; expected none, or "
                "`special_tokens_in_content: text`"
            )
        if any(map(PRIVATE.search, texts)):  # the two could not be distinguished
            raise RowError("has characters of Unicode's last private plane beside special tokens; expected either")
        return self._shielded(value)

    def is_shielded(self, text: str) -> bool:
        """Return whether a text contains special tokens that were replaced by private-use characters."""
        return bool(self.counts and PRIVATE.search(text))

    def encode(self, text: str) -> tuple[list[int], list[Span]]:
        """Return token ids and offsets of a text; special tokens that users wrote are encoded as text."""
        backend, numbers = self._swapped_backend
        # Real tokens become private characters, which this backend knows; shielded ones become what users wrote.
        encoding = backend.encode(self._real_or_shielded.sub(_swap, text), add_special_tokens=False)
        return [numbers.get(number, number) for number in encoding.ids], encoding.offsets

    def unshielded(self, text: str) -> str:
        """Return a text with private-use characters turned back into the special tokens that users wrote."""
        return PRIVATE.sub(_swap, text) if self.counts else text

    def warning(self, counts: Mapping[str, int]) -> str | None:
        """Return a warning that lists the special tokens found in texts, with counts and how they were treated."""
        if not counts:
            return None
        found = ", ".join(f"`{token}` ({counted(count, 'document')})" for token, count in sorted(counts.items()))
        if self._policy == "allow":
            return f"special tokens within texts: {found}; taken as such (`special_tokens_in_content: allow`)"
        return (
            f"special tokens within texts: {found}; encoded as text. Texts that a template has rendered already need "
            "`special_tokens_in_content: allow`"
        )

    @cached_property
    def _swapped_backend(self) -> tuple[Tokenizer, dict[int | None, int]]:
        """Tokenizer that knows special tokens only as private-use characters, with a map to the real token ids."""
        backend = Tokenizer.from_str(self._backend.to_str())  # a copy, which gets further tokens
        backend.encode_special_tokens = True  # encodes `<|im_end|>` as text
        numbers = {}
        for number, token in self._tokens.items():
            shielded = _moved(token.content, PRIVATE_PLANE)
            backend.add_tokens([AddedToken(shielded, lstrip=token.lstrip, rstrip=token.rstrip, normalized=False)])
            numbers[backend.token_to_id(shielded)] = number  # id in the copy -> real id
        return backend, numbers

    def _shielded(self, value: Any) -> Any:
        if isinstance(value, str):
            return self._in_texts.sub(_swap, value)
        if isinstance(value, dict):
            return {self._shielded(key): self._shielded(item) for key, item in value.items()}
        return [self._shielded(item) for item in value] if isinstance(value, list | tuple) else value


def _any_of(contents: list[str]) -> re.Pattern[str]:
    # `(?!)` never matches, while an empty pattern would match everywhere.
    return re.compile("|".join(map(re.escape, contents)) or r"(?!)")


def _swap(match: re.Match[str]) -> str:
    """Convert a matched special token to private-use characters, or such characters back to the special token."""
    return _moved(match[0], -PRIVATE_PLANE if ord(match[0][0]) >= PRIVATE_PLANE else PRIVATE_PLANE)


def _moved(text: str, distance: int) -> str:
    return "".join(chr(ord(character) + distance) for character in text)


def _collect_texts(value: Any, texts: list[str]) -> None:
    """Append all strings in a nested value to a list; a generator would take three times as long."""
    if isinstance(value, str):
        texts.append(value)
    elif isinstance(value, dict):
        for key, item in value.items():
            _collect_texts(key, texts)
            _collect_texts(item, texts)
    elif isinstance(value, list | tuple):
        for item in value:
            _collect_texts(item, texts)


@dataclass(frozen=True)
class LoadedTokenizer:
    """Attributes of a tokenizer, for processes without Transformers. beginning: special tokens before a text."""

    backend_tokenizer: Tokenizer
    chat_template: str | dict[str, str] | None
    special_tokens_map: dict[str, str]
    added_tokens_decoder: dict[int, AddedToken]
    bos_token: str | None
    eos_token: str | None
    bos_token_id: int | None
    eos_token_id: int | None
    pad_token_id: int | None
    beginning: tuple[int, ...]


def _picklable(folder: Path) -> LoadedTokenizer:
    """Load a model folder's tokenizer in a form that can be pickled. Raises ModelError if there is no usable one."""
    tokenizer = load_tokenizer(folder)
    if not tokenizer.is_fast:
        raise ModelError(
            f"the tokenizer in {folder} ({type(tokenizer).__name__}) does not say which characters a token stands "
            "for; convert it to a tokenizer.json"
        )
    # A tokenizer.json may ask for both, and texts would be cut or filled up.
    tokenizer.backend_tokenizer.no_truncation()
    tokenizer.backend_tokenizer.no_padding()
    growth = LengthGrowth.of(tokenizer.backend_tokenizer)
    letter = next((letter for letter in EXAMPLES if growth.problem(letter) is None), None)
    if letter is None:
        raise ModelError(f"the tokenizer in {folder} {growth.problem(EXAMPLES[0])}")
    example = tokenizer(letter, return_special_tokens_mask=True)
    special = zip(example["input_ids"], example["special_tokens_mask"], strict=True)
    return LoadedTokenizer(
        tokenizer.backend_tokenizer,
        tokenizer.chat_template,
        tokenizer.special_tokens_map,
        tokenizer.added_tokens_decoder,
        tokenizer.bos_token,
        tokenizer.eos_token,
        tokenizer.bos_token_id,
        tokenizer.eos_token_id,
        tokenizer.pad_token_id,
        # Only what stands before the text: what the tokenizer adds after it is left out.
        tuple(token for token, _ in takewhile(itemgetter(1), special)),
    )
