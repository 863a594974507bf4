"""Rendering of conversations by chat templates, which are untrusted code and run in their own limited process.

There (`template_program`) a conversation becomes its text, and what the assistant said in it is proved
(`proved_template`). One process answers for all templates of this one, many conversations at a time.
"""

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
from stages.data.media_reference import MediaReference
from stages.data.messages import Conversation, Message, RowError, Span, make_message

MAX_CPU_SECONDS = 10.0
"""Limit of CPU seconds for rendering a short conversation with a chat template; longer conversations get more."""
MEMORY_BYTES = 512 << 20
"""Limit of memory in bytes for rendering a short conversation with a chat template; longer conversations get more."""
ANSWER_TIMEOUT_S = 1800.0
"""Time limit in seconds for an answer of the rendering process, in case it gets no CPU or cannot be killed."""
QUESTION_CONVERSATIONS = 64
MAX_BYTES = 1 << 20
"""Largest size in bytes of a chat template's file; the longest published templates have some 20 KiB."""
MAX_QUOTED = 200
"""Largest number of characters of a template or row that an error message quotes."""

Work = Literal["together", "separately", "text", "prompt"]
"""Ways to render a conversation, as texts to learn from, as one text, or as a prompt up to where the answer begins.

together: earlier turns share one text even where the template drops their thoughts. separately: a turn whose thoughts
would be dropped gets a text of its own."""


class TemplateLimitError(DataError):
    """Raised when a chat template takes too much time or memory for one conversation."""


@dataclass(frozen=True)
class Rendered:
    """Text of a document as rendered by its chat template, with the spans that carry loss, in order."""

    text: str
    spans: tuple[Span, ...]
    is_plain: bool = False
    """True if the text is plain, not from a chat template; the tokenizer then adds its special tokens around it."""
    is_shielded: bool = False
    """True if special tokens in users' texts were replaced by private-use characters, to be encoded as text."""
    media: tuple[MediaReference, ...] = ()
    """Media of the text, in order; what stands for them is in the text."""
    inserted: tuple[Span, ...] = ()
    """Spans of what a processor wrote for each medium, which carries no loss."""


class ChatTemplate:
    """Chat template of a recipe or model, which a separate process with limits of time and memory executes."""

    def __init__(
        self,
        source: str,
        special_tokens: dict[str, str],
        markers: Sequence[str],
        name: str,
        today: date = DEFAULT_DATE,
    ) -> None:
        """Compile the chat template; raise DataError if it is not valid Jinja. Arguments: as of `ProvedTemplate`."""
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
        """Number of turns learned without their reasoning (thoughts), because the template dropped it."""
        self.wrote_date = False
        self.cpu_s = 0.0
        """CPU seconds that the rendering process has used for this template."""
        for answer in self._answers([]):
            self._check(answer)

    @property
    def name(self) -> str:
        """Name of the template in messages."""
        return self._name

    @property
    def source(self) -> str:
        return str(self._source["source"])

    def forget(self) -> None:
        """Reset the records about rendered texts: turns that lost their reasoning, and whether the date was written."""
        self.num_dropped_thoughts = 0
        self.wrote_date = False

    def rendered(self, conversations: Sequence[tuple[Work, Conversation]]) -> Iterator[tuple[Rendered, ...] | RowError]:
        """Yield the rendered texts of each conversation, the longest last, or a RowError if it is refused.

        That is: the template refuses the messages, leaves a part out or does not show the assistant's turns. Raises
        DataError when it never shows them, TemplateLimitError at a conversation that takes too long.
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
        """Return a conversation's texts to train on, loss on the assistant's turns; raises RowError, as `rendered`."""
        return self._of_one(turns, conversation)

    def render(self, conversation: Conversation) -> Rendered:
        """Return a conversation rendered as one text to train on. Raises RowError if it needs several texts."""
        return self.as_one(self.documents(conversation))

    def render_text(self, conversation: Conversation, *, add_generation_prompt: bool = False) -> str:
        """Return a whole conversation as text, without loss spans. Raises RowError, TemplateLimitError."""
        return self._of_one("prompt" if add_generation_prompt else "text", conversation)[0].text

    def as_one(self, documents: tuple[Rendered, ...]) -> Rendered:
        """Return the only text of a rendered conversation. Raises RowError if there are several."""
        *others, whole = documents
        if others:
            raise RowError(
                f"has earlier turns after the prompt that {self._name} writes otherwise once others follow; expected "
                "one answer of the assistant, as its last message"
            )
        return whole

    def ends_turns(self, rendered: Rendered) -> bool:
        """Return whether every turn with loss ends with a special token, so that the model learns to stop."""
        return all(rendered.text[begin:end].rstrip().endswith(self._markers) for begin, end in rendered.spans)

    @cached_property
    def learned_after_turns(self) -> str:
        """Text with loss that the template adds only after the last turn, usually none (Phi-3: another end token)."""
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
        """Yield the rendering process's response for each conversation, or an error response for a bad template."""
        left = [(work, *_as_json(conversation)) for work, conversation in conversations]
        size = QUESTION_CONVERSATIONS
        # Once even without conversations: the question then compiles the template.
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
            # The process may answer the first ones only (`ANSWER_CPU_S`); the others are asked for next.
            left = left[len(answers) :]
            if not left:
                return

    def _asked(self, conversations: Sequence[Any]) -> list[dict[str, Any]]:
        question: dict[str, Any] = {"key": self._key, "conversations": conversations}
        question |= {"cpu_s": MAX_CPU_SECONDS, "memory_bytes": MEMORY_BYTES}
        program, lock = _program(os.getpid())
        with lock:
            outcome = program.ask(question, ANSWER_TIMEOUT_S)
            # It does not have this template: it has just started, or dropped it for others.
            if outcome is None:
                outcome = program.ask({**question, "source": self._source}, ANSWER_TIMEOUT_S)
        self.cpu_s += outcome["cpu_s"]
        answers: list[dict[str, Any]] = outcome["answers"]
        return answers

    def _check(self, answer: dict[str, Any]) -> None:
        """Raise the RowError, DataError or TemplateLimitError that the rendering process reports."""
        if "row" in answer:
            raise RowError(_joined(answer["row"]))
        if "template" in answer:
            raise DataError(_joined(answer["template"]))
        if "limit" in answer:
            raise TemplateLimitError(f"{self._name} {answer['limit']}; fix it, or give another one (`chat_template`)")


def load_chat_template(
    tokenizer: Any, tokenizer_folder: Path, recipe_template: Path | None, today: date = DEFAULT_DATE
) -> ChatTemplate:
    """Return the chat template of the recipe, or else the tokenizer's own. Raises DataError if there is none."""
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
    """Return the text of a recipe's chat template file. Raises DataError if it is not a valid template."""
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
    """Return the client of this process's rendering process, with a lock. A forked process gets another one."""
    return Program("stages.data.template_program"), threading.Lock()


def _as_json(conversation: Conversation) -> tuple[list[Message], dict[str, Any]]:
    """Return a conversation as JSON values for the rendering process: its messages, and its other non-empty fields."""
    others = {name: value for name, value in vars(conversation).items() if value and name not in ("messages", "media")}
    if "unlearned" in others:
        others["unlearned"] = sorted(others["unlearned"])
    return conversation.messages, others


def _joined(parts: list[str]) -> str:
    """Return an error message from its parts, redacting and shortening the quotations from a template or row."""
    # Even parts are our words, odd ones come from a template or a row.
    return "".join(quoted(part, MAX_QUOTED) if number % 2 else part for number, part in enumerate(parts))
