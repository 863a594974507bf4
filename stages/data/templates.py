"""Chat templates, untrusted code that comes with models: rendered in a process of its own, within limits.

There (`template_program`) a conversation becomes its text, and which characters of it the assistant said is proved
(`proved_template`). One process answers for all templates of this one, many conversations at a time.
"""

from __future__ import annotations

import hashlib
import json
import os
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import date
from functools import cache, cached_property
from pathlib import Path
from typing import Any, Literal

from stages.core.errors import DataError
from stages.core.program import Program, ProgramEndedError
from stages.core.redaction import quoted
from stages.data.config import DEFAULT_DATE
from stages.data.messages import Conversation, Message, RowError, Span, make_message

MAX_CPU_SECONDS = 10.0
"""CPU time for one conversation of a few messages; independent of a busy machine."""
MEMORY_BYTES = 512 << 20
"""Memory for one conversation, beside what its own length needs."""
ANSWER_TIMEOUT_S = 1800.0
"""Time limit for a process that gets no CPU, or that the kernel does not end."""
QUESTION_CONVERSATIONS = 64
MAX_BYTES = 1 << 20
"""Largest template file; the longest published ones have some 20 KiB."""
MAX_QUOTED = 200
"""Characters of a template's or a row's own text in an error."""

Work = Literal["together", "separately", "text", "prompt"]
"""Ways to render a conversation.

- together: texts to learn from; earlier turns share one text even where the template drops their thoughts
- separately: the same, but a turn whose thoughts would be dropped gets a text of its own
- text: all of it as one text
- prompt: the same, up to where the next answer begins
"""


class TemplateLimitError(DataError):
    """Raised for a template that takes too much time or memory for one conversation."""


@dataclass(frozen=True)
class Rendered:
    """Text of a document, with the spans of it that carry loss, in order."""

    text: str
    spans: tuple[Span, ...]
    is_plain: bool = False
    """True if no template rendered it, so that the tokenizer's own special tokens go around it."""
    is_shielded: bool = False
    """True if special tokens within the text were shielded by `SpecialTokens`: moved to private characters."""


class ChatTemplate:
    """Client of the process that renders conversations with one Jinja template."""

    def __init__(
        self,
        source: str,
        special_tokens: dict[str, str],
        markers: Sequence[str],
        name: str,
        today: date = DEFAULT_DATE,
    ) -> None:
        """Compile the template. Raises DataError for a template that is not Jinja.

        - special_tokens: the template's variables (`bos_token`, …)
        - markers: strings of all special tokens
        - name: the template's name in errors
        - today: the date that it writes
        """
        self._name = name
        self._markers = tuple(markers)
        self._source = {
            "source": source,
            "special_tokens": special_tokens,
            "markers": self._markers,
            "name": name,
            "today": today.isoformat(),
        }
        self._key = hashlib.sha256(json.dumps(self._source).encode()).hexdigest()
        self.num_dropped_thoughts = 0
        """Number of turns that were learned without the thoughts that the data have for them."""
        self.wrote_date = False
        """True if the date was written into a text since `forget`."""
        self.cpu_s = 0.0
        """CPU time of the rendering process so far."""
        for answer in self._answers([]):
            self._check(answer)

    def forget(self) -> None:
        """Reset the counts of rendering: dropped thoughts, and whether the date was written."""
        self.num_dropped_thoughts = 0
        self.wrote_date = False

    def rendered(self, conversations: Sequence[tuple[Work, Conversation]]) -> Iterator[tuple[Rendered, ...] | RowError]:
        """Yield the texts of each conversation; several where the template rewrites earlier turns, the whole one last.

        RowError: the template refuses the messages, leaves a part of them out or does not show the assistant's turns.
        Raises DataError when it never shows them, TemplateLimitError at a conversation that takes too long.
        """
        for answer in self._answers(conversations):
            try:
                self._check(answer)
            except RowError as error:
                yield error
                continue
            self.num_dropped_thoughts += sum(num_dropped for *_, num_dropped in answer["texts"])
            self.wrote_date |= answer["date"]
            yield tuple(Rendered(text, tuple(map(tuple, spans))) for text, spans, _ in answer["texts"])

    def documents(
        self, conversation: Conversation, turns: Literal["together", "separately"] = "together"
    ) -> tuple[Rendered, ...]:
        """Return the texts to learn from, with loss on what the assistant says after the prompt; the whole one last.

        Raises RowError and what `rendered` does.
        """
        return self._of_one(turns, conversation)

    def render(self, conversation: Conversation) -> Rendered:
        """Return the one text to learn from. Raises as `documents` does, and RowError when there are several."""
        return self.as_one(self.documents(conversation))

    def render_text(self, conversation: Conversation, *, add_generation_prompt: bool = False) -> str:
        """Return the whole text. Raises RowError when the template refuses the messages, and TemplateLimitError."""
        return self._of_one("prompt" if add_generation_prompt else "text", conversation)[0].text

    def as_one(self, documents: tuple[Rendered, ...]) -> Rendered:
        """Return the one text of a conversation. Raises RowError when there are several."""
        *others, whole = documents
        if others:
            raise RowError(
                f"has earlier turns after the prompt that {self._name} writes otherwise once others follow; expected "
                "one answer of the assistant, as its last message"
            )
        return whole

    def ends_turns(self, rendered: Rendered) -> bool:
        """Return whether every learned turn ends with a special token, so that a model learns to stop."""
        return all(rendered.text[begin:end].rstrip().endswith(self._markers) for begin, end in rendered.spans)

    @cached_property
    def learned_after_turns(self) -> str:
        """Text that the last turn of a conversation learns beyond the end that all turns have; empty for most
        templates.

        Phi-3's template, for example, ends a conversation with another special token.
        """
        turns = [make_message(role, f"q{role}{number}") for number in (1, 2) for role in ("user", "assistant")]
        try:
            documents = self.documents(Conversation(turns))
        except RowError:
            return ""  # the template refuses this conversation; unsuitable rows are reported one by one
        learned = [document.text[begin:end] for document in documents for begin, end in document.spans]
        ends = [text.partition(f"qassistant{number}")[2] for number, text in enumerate(learned, 1)]
        return ends[1].removeprefix(ends[0]) if len(ends) == 2 and ends[1].startswith(ends[0]) else ""

    def _of_one(self, work: Work, conversation: Conversation) -> tuple[Rendered, ...]:
        (outcome,) = self.rendered([(work, conversation)])
        if isinstance(outcome, RowError):
            raise outcome
        return outcome

    def _answers(self, conversations: Sequence[tuple[Work, Conversation]]) -> Iterator[dict[str, Any]]:
        """Yield the program's answer to each conversation; without conversations, the template's fault, if any."""
        left = [(work, *_as_json(conversation)) for work, conversation in conversations]
        size = QUESTION_CONVERSATIONS
        while True:
            try:
                answers = self._asked(left[:size])
            except (ProgramEndedError, TimeoutError) as error:
                if size > 1:  # each alone, to find the one that ended it
                    size = 1
                    continue
                limits = f"{MAX_CPU_SECONDS:g} s of the processor and {MEMORY_BYTES >> 20} MiB of memory"
                answers = [{"limit": f"takes more than a short conversation may, {limits}: its process {error}"}]
            yield from answers
            left = left[len(answers) :]
            if not left:
                return

    def _asked(self, conversations: Sequence[Any]) -> list[dict[str, Any]]:
        question: dict[str, Any] = {"key": self._key, "conversations": conversations}
        question |= {"cpu_s": MAX_CPU_SECONDS, "memory_bytes": MEMORY_BYTES}
        program, lock = _program(os.getpid())
        with lock:
            outcome = program.ask(question, ANSWER_TIMEOUT_S)
            if outcome is None:
                outcome = program.ask({**question, "source": self._source}, ANSWER_TIMEOUT_S)
        self.cpu_s += outcome["cpu_s"]
        answers: list[dict[str, Any]] = outcome["answers"]
        return answers

    def _check(self, answer: dict[str, Any]) -> None:
        """Raise RowError, DataError or TemplateLimitError for an answer that is none of texts."""
        if "row" in answer:
            raise RowError(_joined(answer["row"]))
        if "template" in answer:
            raise DataError(_joined(answer["template"]))
        if "limit" in answer:
            raise TemplateLimitError(f"{self._name} {answer['limit']}; fix it, or give another one (`chat_template`)")


def load_chat_template(
    tokenizer: Any, tokenizer_folder: Path, recipe_template: Path | None, today: date = DEFAULT_DATE
) -> ChatTemplate:
    """Return the recipe's template, or the tokenizer's own. Raises DataError when there is none."""
    special_tokens = {name: str(token) for name, token in tokenizer.special_tokens_map.items()}
    markers = [str(token) for token in tokenizer.added_tokens_decoder.values() if token.special]
    source, name = tokenizer.chat_template, "the model's chat template"
    if isinstance(source, dict):  # several, by name
        source = source.get("default")
    if recipe_template is not None:
        source, name = read_template(recipe_template), f"the chat template {recipe_template.name}"
    elif not source:
        raise DataError(
            f"the data are conversations, but the tokenizer in {tokenizer_folder} has no chat template. Name a Jinja "
            "file in the recipe (`data: {chat_template: chatml.jinja}`), or use a model that has one."
        )
    return ChatTemplate(source, special_tokens, markers, name, today)


def read_template(path: Path) -> str:
    """Return the text of the Jinja file that a recipe names. Raises DataError unless it is a template that compiles."""
    if not path.is_file():
        raise DataError(f"there is no chat template {path}; `chat_template` names a Jinja file")
    if path.stat().st_size > MAX_BYTES:
        raise DataError(f"the chat template {path} is longer than {MAX_BYTES:,} bytes; name a Jinja file")
    try:
        source = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise DataError(f"the chat template {path} is not UTF-8 text: {error.reason}; name a Jinja file") from error
    if not source.strip():
        raise DataError(f"the chat template {path} is empty; write one, or leave out `chat_template`")
    ChatTemplate(source, {}, (), f"the chat template {path}")
    return source


@cache
def _program(_process: int) -> tuple[Program, threading.Lock]:
    """Return the rendering program and its lock; another one after a fork."""
    return Program("stages.data.template_program"), threading.Lock()


def _as_json(conversation: Conversation) -> tuple[list[Message], dict[str, Any]]:
    """Return a conversation for JSON: its messages, and its other fields that are not empty."""
    others = {name: value for name, value in vars(conversation).items() if value and name != "messages"}
    if "unlearned" in others:
        others["unlearned"] = sorted(others["unlearned"])
    return conversation.messages, others


def _joined(parts: list[str]) -> str:
    """Return an error's text from parts: our words and quoted texts of a template or row in turn."""
    return "".join(quoted(part, MAX_QUOTED) if number % 2 else part for number, part in enumerate(parts))
