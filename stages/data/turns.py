"""Search for the assistant's turns in a rendered conversation, proved by comparing what the chat template renders.

A turn is learned as the model will be asked for it: the messages before it, rendered with the generation prompt, must
be the beginning of the text that ends with the turn, and in a longer conversation it must stand with the same words.
Where a template rewrites what went before (drops thoughts, ends the last turn otherwise, moves the system prompt), a
conversation becomes several documents: each turn in the longest that still shows it so.

Example, with a template that writes `<USER>question<END>` and `<BOT>answer<END>`, and `<BOT>` as generation prompt:

    messages           user "1+1?", assistant "2", user "2+2?", assistant "4"
    last turn          prompt `<USER>1+1?<END><BOT>2<END><USER>2+2?<END><BOT>`; the whole text begins so, and what
                       follows, `4<END>`, is learned
    first turn         prompt `<USER>1+1?<END><BOT>`, text up to the turn `<USER>1+1?<END><BOT>2<END>`: `2<END>` stands
                       at the same place of the whole text, so one document learns both turns

Had the template dropped the first answer's thoughts once the second question follows, the first turn would not stand in
the whole text as it was generated, and would be learned in a document of its own, `<USER>1+1?<END><BOT>…2<END>`.

Each turn is rendered with all before it: work that grows with the square of the turns; conversations that would take
too long are refused.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache

from stages.data.messages import THOUGHTS, Message, RowError, Span, listed, texts_of

Write = Callable[..., str]
"""Function that renders messages with a chat template: (messages, add_generation_prompt, variables) → text."""
MAX_MESSAGES = 1 << 21
"""Largest number of messages rendered for one conversation's turns, enough for a thousand turns in ten seconds."""
MAX_KEPT_CHARACTERS = 1 << 26
OPENED_THOUGHTS = re.compile(r"<think>(\s*)\Z")
CLOSED_THOUGHTS = re.compile(r"</think>\s*\Z")
EMPTY_THOUGHTS = re.compile(r"\A\s*(<think>)?\s*</think>\s*")
THOUGHTS_FIRST = re.compile(r"\A\s*<think>.*?</think>(?P<gap>\s*)", re.DOTALL)
INLINE_THOUGHTS = re.compile(r"\A\s*(?:<think>)?(?P<thoughts>.*?)</think>(?P<answer>.*)\Z", re.DOTALL)
PROBE = "qprobetext"
"""Text that is appended to a message's content, to test whether the chat template shows that content to its end."""
SWITCHES = ("enable_thinking", "thinking")
"""Names under which chat templates know the variable that switches a model's reasoning on or off."""


class QuotingError(RowError):
    """Raised for a bad row, with a message that quotes texts of any length from the template or the row.

    parts: our words and such texts in turn; only the asking process knows the secrets in them, and cuts them.
    """

    def __init__(self, *parts: str) -> None:
        super().__init__("".join(parts))
        self.parts = parts


class UnclearTurnsError(QuotingError):
    """Raised when the assistant's tokens cannot be proved, or a message is left out. cause: a sentence, in parts."""

    def __init__(self, begin: str, *parts: str) -> None:
        super().__init__(f"cannot be learned from: {begin}", *parts)
        self.cause = (begin, *parts)


@dataclass(frozen=True)
class Document:
    """Rendered text of a conversation, with the spans of the assistant's turns that are learned."""

    text: str
    spans: tuple[Span, ...]
    num_dropped_thoughts: int
    """Number of turns learned without their reasoning (thoughts), because the template dropped it."""


class Turns:
    """Finder of the assistant's turns, as spans of characters, in the rendered texts of one conversation."""

    def __init__(
        self,
        write: Write,
        messages: Sequence[Message],
        markers: tuple[str, ...],
        name: str,
        *,
        together: bool,
        writes_think: bool,
    ) -> None:
        """Create the finder of the assistant's turns in one conversation, given the function that renders messages.

        markers: all special tokens. name: the template's name in errors. together: a turn may be learned without
        thoughts that the template drops; else it gets a document of its own. writes_think: the template writes thoughts
        between `<think>` and `</think>`.
        """
        self._write = Renderings(write, messages, keep=not together)
        self._messages = list(messages)
        self._markers = markers
        self._name = name
        self._together = together
        self._writes_think = writes_think
        self._only_markers = _only(markers)

    def documents(self, learned_turns: Sequence[int]) -> list[Document]:
        """Return rendered texts, the longest last, that carry loss on each of the given turns exactly once.

        Raises RowError for too many messages, a turn that cannot be proved, or a part that the template leaves out.
        """
        remaining = list(learned_turns)
        if not remaining:
            return [Document(self._write(self._messages), (), 0)]
        # Each turn is rendered with all messages before it, at least once.
        self._write.check(sum(remaining))
        documents: list[Document] = []
        while remaining:
            # The longest text first: turns that it does not show unchanged get texts of their own, the last turn first.
            *earlier, last = remaining
            turn = self._as_last(last)
            shown = self._shown_messages(turn, last)
            spans = {number: self._within(turn, shown, number) for number in earlier}
            learned = {number: span for number, span in spans.items() if span is not None}
            learned[last] = (turn.begin, self._end(turn.text, turn.begin))
            dropped = [number for number, span in learned.items() if not self._has_thoughts(number, turn.text, span)]
            documents.insert(0, Document(turn.text, tuple(learned.values()), len(dropped)))
            remaining = [number for number in earlier if number not in learned]
        return documents

    def _as_last(self, number: int) -> _Turn:
        """Render a conversation up to an assistant's turn, and return this turn at the end of the text.

        The text is the template's by default, or with its switch for thoughts as the turn has some or not; or else the
        prompt, followed by the turn with its thoughts as models write them.
        """
        messages = self._messages[: number + 1]
        thoughts, _ = split_thoughts(messages[-1])
        built: list[_Turn] = []
        for variables in ({}, dict.fromkeys(SWITCHES, bool(thoughts))):
            before = self._write(messages[:-1], add_generation_prompt=True, **variables)
            text = self._write(messages, **variables)
            if text.startswith(before) and _shows(thoughts, text[len(before) :], messages[-1]):
                # What the template itself writes is preferred to a turn that was put together.
                built = [_Turn(text, len(before), variables)]
                break
            if self._writes_think and (turn := _with_own_thoughts(before, text, thoughts, variables)):
                built.append(turn)
        turn = built[0] if built else self._behind_its_prompt(messages)
        self._check_shown(messages, turn)
        return turn

    def _behind_its_prompt(self, messages: list[Message]) -> _Turn:
        """Append the last answer to its prompt, for templates that write the prompt differently once an answer follows.

        Some show a system prompt, or thoughts beside a call, in a prompt only.
        """
        # True is 1 as an index: a system prompt is left out.
        plain = [*map(_plain, messages[messages[0]["role"] == "system" : -1])]
        # Prompt and text from the same plainer history: only their difference, the turn itself, is used.
        start = self._write(plain, add_generation_prompt=True)
        text = self._write([*plain, messages[-1]])
        thoughts, _ = split_thoughts(messages[-1])
        if not text.startswith(start) or not _shows(thoughts, text[len(start) :], messages[-1]):
            raise self._not_a_prefix(messages)
        before = self._write(messages[:-1], add_generation_prompt=True)
        return _Turn(before + text[len(start) :], len(before), {})

    def _shown_messages(self, turn: _Turn, last: int) -> list[Message]:
        """Return messages without the reasoning that the template dropped, if they are still rendered to the same text.

        A template that drops the thoughts before the last question shows them in a beginning that ends before it.
        """
        messages = self._messages[: last + 1]
        reduced = [
            {key: value for key, value in message.items() if key not in THOUGHTS or value.strip() in turn.text}
            for message in messages
        ]
        if self._together and reduced != messages and self._write(reduced, **turn.variables) == turn.text:
            return reduced
        return messages

    def _within(self, turn: _Turn, messages: list[Message], number: int) -> Span | None:
        """Return the span of an earlier assistant turn in a longer text; None if the turn is different there."""
        before = self._write.beginning(messages, number, add_generation_prompt=True, **turn.variables)
        if not turn.text.startswith(before):
            return None
        own = self._write.beginning(messages, number + 1, **turn.variables)
        if not own.startswith(before):
            return None
        span = len(before), len(before) + self._num_shared(own[len(before) :], turn.text[len(before) :])
        if span[0] == span[1] or not (self._together or self._has_thoughts(number, turn.text, span)):
            return None
        self._check_shown(messages[: number + 1], _Turn(own, len(before), turn.variables))
        return span

    def _num_shared(self, own: str, rest: str) -> int:
        """Return the turn's length at the beginning of `rest`, 0 if unsure. own: its text as the last turn."""
        if rest.startswith(own):
            return self._end(own, 0)
        shared = next((i for i, pair in enumerate(zip(own, rest, strict=False)) if pair[0] != pair[1]), len(rest))
        # For each end token in the common beginning: the end of its last occurrence.
        ends = [own.rfind(marker, 0, shared) + len(marker) for marker in self._markers if marker in own[:shared]]
        if ends and self._only_markers.match(own, max(ends)):
            return max(ends)  # the rest ends the text, not the turn
        # The rest may have dropped the thoughts, and some of the white space after them.
        head = THOUGHTS_FIRST.match(own) if self._together else None
        starts = range(head.start("gap"), head.end() + 1) if head else ()
        answers = (own[start:] for start in starts if own[start:].strip())
        return next((self._end(answer, 0) for answer in answers if rest.startswith(answer)), 0)

    def _end(self, text: str, begin: int) -> int:
        """Return where an assistant's turn ends. Line breaks after its end token, never generated, are left out."""
        stripped = text.rstrip()
        return len(stripped) if len(stripped) > begin and stripped.endswith(self._markers) else len(text)

    def _has_thoughts(self, number: int, text: str, span: Span) -> bool:
        thoughts, _ = split_thoughts(self._messages[number])
        return _shows(thoughts, text[slice(*span)], self._messages[number])

    def _check_shown(self, messages: list[Message], turn: _Turn) -> None:
        """Raise RowError if the chat template leaves out text or tool calls of the last message."""
        *before, message = messages
        _, answer = split_thoughts(message)
        calls = message.get("tool_calls", [])
        if not calls and answer.strip() in turn.text[turn.begin :]:
            return
        # Empty content stays empty, since templates ask whether there is any.
        probe = {**message, "content": message["content"] and f"{message['content']}{PROBE}"}
        # Each call gets a name of its own: two calls of one function look the same.
        names = {f"qprobecall{number}": call for number, call in enumerate(calls, 1)}
        if calls:
            probe["tool_calls"] = [
                {**call, "function": {**call["function"], "name": name}} for name, call in names.items()
            ]
        text = self._write([*before, probe], **turn.variables)
        parts = {PROBE: "content"} if answer.strip() else {}
        parts |= {name: f"tool call {number}" for number, name in enumerate(names, 1)}
        if missing := [part for probe_text, part in parts.items() if probe_text not in text]:
            raise RowError(
                f"has {listed(missing)} in message {len(messages)}, which {self._name} leaves out; expected what it "
                "shows, or a template (`chat_template`) that shows this too"
            )

    def _not_a_prefix(self, messages: list[Message]) -> RowError:
        before = self._write(messages[:-1], add_generation_prompt=True)
        text = self._write(messages)
        if text.startswith(before):
            return RowError(f"has thoughts in message {len(messages)}, which {self._name} leaves out; expected none")
        shared = next((i for i, pair in enumerate(zip(before, text, strict=False)) if pair[0] != pair[1]), len(text))
        return UnclearTurnsError(
            f"{self._name} does not show which tokens the assistant says: rendered up to message {len(messages)}, "
            "the prompt reads …",
            before[shared:],
            " where the conversation reads …",
            text[shared:],
            ". Give a template (`chat_template`) that puts the assistant's part into {% generation %} … "
            "{% endgeneration %}, or learn everything (`train_on: all`).",
        )


@dataclass(frozen=True)
class _Turn:
    """Assistant's turn at the end of a rendered text. begin: index of the turn's first character."""

    text: str
    begin: int
    variables: dict[str, bool]


class Renderings:
    """Renderer of one conversation that limits rendered messages. keep: cache texts of the beginnings."""

    def __init__(self, write: Write, messages: Sequence[Message], *, keep: bool) -> None:
        self._write = write
        self._length = len(messages)
        self._num_messages = 0
        self._may_keep = MAX_KEPT_CHARACTERS if keep else 0
        self._kept: dict[tuple[object, ...], str] = {}

    def __call__(self, messages: Sequence[Message], **options: bool) -> str:
        """Render messages; raise RowError beyond the limit of messages rendered for one conversation."""
        self.check(len(messages))
        self._num_messages += len(messages)
        return self._write(list(messages), **options)

    def check(self, num_messages: int) -> None:
        """Raise RowError if rendering this many more messages would exceed the limit of one conversation."""
        if self._num_messages + num_messages > MAX_MESSAGES:
            raise RowError(
                f"has {self._length:,} messages: to prove what the assistant says, each turn is rendered with all "
                f"before it, and more than {MAX_MESSAGES:,} would be in all; split the conversation, give a template "
                "(`chat_template`) with {% generation %} marks, or learn everything (`train_on: all`)"
            )

    def beginning(self, messages: Sequence[Message], number: int, **options: bool) -> str:
        """Return the rendered text of a conversation's first `number` messages, from the cache if it is there."""
        # Without the messages: where texts are kept, they are always the conversation's own.
        key = (number, *options.items())
        text = self._kept.get(key) or self(messages[:number], **options)
        if key not in self._kept and len(text) <= self._may_keep:
            self._kept[key] = text
            self._may_keep -= len(text)
        return text


@cache
def _only(markers: tuple[str, ...]) -> re.Pattern[str]:
    """Return a pattern that matches if only white space and special tokens follow up to the end of a text."""
    # `(?!)` never matches: without special tokens, only white space may follow.
    return re.compile(rf"(?:\s|{'|'.join(map(re.escape, markers)) or '(?!)'})*\Z")


def check_shown(write: Write, messages: Sequence[Message], text: str, name: str) -> None:
    """Raise UnclearTurnsError if a rendered text leaves out a message's content or the end of the content."""
    for number, message in enumerate(messages):
        if isinstance(message["content"], list):
            _check_parts_shown(messages, number, text, name)
            continue
        content: str = message["content"] or ""
        # A question may contain the system prompt's text, and so hide that the template leaves out the prompt.
        confusable = (other for other in messages if message["role"] == "system" and other is not message)
        if content.strip() in text and not any(
            content.strip() in one for other in confusable for one in texts_of(other)
        ):
            continue
        probe = {**message, "content": f"{content}{PROBE}"}  # some write a tool's answer as JSON, or drop thoughts
        if PROBE not in write([*messages[:number], probe, *messages[number + 1 :]]):
            raise UnclearTurnsError(
                f"{name} leaves out what `{message['role']}` says in message {number + 1}, or its end; expected none, "
                "or a template (`chat_template`) that shows it"
            )


def _check_parts_shown(messages: Sequence[Message], number: int, text: str, name: str) -> None:
    """Raise UnclearTurnsError if a rendered text leaves out a text between the media of a message."""
    if missing := [part for part in texts_of(messages[number]) if part.strip() not in text]:
        raise UnclearTurnsError(
            f"{name} leaves out, or rewrites, in message {number + 1} the text ",
            missing[0],
            ", which stands beside media; expected none, or a template (`chat_template`) that shows it",
        )


def _with_own_thoughts(before: str, text: str, thoughts: str, variables: dict[str, bool]) -> _Turn | None:
    """Return the turn with its reasoning restored, for templates that open `<think>` in a prompt but drop it later.

    As models write them: the prompt's `<think>`, the thoughts, `</think>`, the answer.
    """
    opened = OPENED_THOUGHTS.search(before)
    base = before[: opened.start()] if opened else before
    # A prompt that closes the thoughts itself asks for an answer without any.
    if not text.startswith(base) or not (opened or thoughts.strip()) or CLOSED_THOUGHTS.search(before):
        return None
    gap = opened[1] if opened else "\n"
    opening = "" if opened else f"<think>{gap}"
    answer = EMPTY_THOUGHTS.sub("", text[len(base) :]).lstrip("\n")
    return _Turn(f"{before}{opening}{thoughts.strip()}{gap}</think>{gap * 2}{answer}", len(before), variables)


def split_thoughts(message: Message) -> tuple[str, str]:
    """Return a message's reasoning (from a field, or before `</think>` in its text) and its answer."""
    content: str = message["content"] or ""  # null beside calls
    for field in THOUGHTS:
        if field in message:
            return message[field], content
    inline = INLINE_THOUGHTS.match(content) if "</think>" in content else None
    return (inline["thoughts"], inline["answer"]) if inline else ("", content)


def _plain(message: Message) -> Message:
    """Return a plainer copy of a chat message: without reasoning and, beside tool calls, without text."""
    _, answer = split_thoughts(message)
    plain = {key: value for key, value in message.items() if key not in THOUGHTS}
    return {**plain, "content": "" if "tool_calls" in message else answer}


def _shows(thoughts: str, text: str, message: Message) -> bool:
    thoughts = thoughts.strip()
    _, answer = split_thoughts(message)
    # The answer may quote its thoughts: they must stand there once more than that.
    return not thoughts or text.count(thoughts) > answer.count(thoughts)
