"""Renderer of conversations with an untrusted chat template, which proves which part of a text the assistant says.

Templates that mark the assistant's part with `{% generation %}` are believed; all others are rendered turn by turn
(`turns`). A first conversation of known words proves that masks hold what the assistant says and nothing that others
say.

A template runs in Jinja's immutable sandbox, on a fixed date, with what Transformers gives it (`raise_exception`,
`strftime_now`, `tojson`, `{% generation %}`, loop controls) and nothing else. This module runs in the process of
`template_program`, which limits time and memory; everything else asks `templates`. Imports Jinja and little else.
"""

import json
import re
from collections.abc import Callable, Sequence
from datetime import date, datetime
from functools import cached_property
from typing import Any

import jinja2
from jinja2 import meta, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from stages.data.messages import (
    THOUGHTS,
    Conversation,
    Message,
    RowError,
    Span,
    Tool,
    in_parts,
    listed,
    make_message,
    renamed,
    with_calls_as,
)
from stages.data.turns import Document, QuotingError, Turns, UnclearTurnsError, Write, check_shown, split_thoughts

GENERATION_MARK = re.compile(r"\{%-?\s*generation\s*-?%\}")
GIVEN = {"messages", "tools", "documents", "add_generation_prompt"}
"""Template variables that a row may not set, because the conversation or the caller sets them."""
TOOL_TEMPLATES = "configs/templates/chatml-tools.jinja or turns-tools.jinja"
"""Chat templates of this project, suggested for models whose own template cannot render tools."""
PROBES = (("system", "user", "assistant", "user", "assistant"), ("user", "assistant", "user", "assistant"))
PROBE_CALL = {"id": "call00001", "type": "function", "function": {"name": "qprobe", "arguments": {"qkey": True}}}


class ProvedTemplate:
    """Renderer of conversations with one chat template, which proves that its loss masks are right."""

    def __init__(
        self, source: str, special_tokens: dict[str, str], markers: Sequence[str], name: str, today: date
    ) -> None:
        """Compile the chat template; raise jinja2.TemplateSyntaxError.

        special_tokens: the template's variables (`bos_token`, …). markers: strings of all special tokens. name: the
        template's, in errors. today: the date that it writes.
        """
        self._variables = special_tokens
        self._markers = tuple(markers)
        self._name = name
        # A field that a template does not even mention cannot be rendered by it.
        self._words = frozenset(re.findall(r"\w+", source))
        self._writes_think = "</think>" in source or "<think>" in source
        self._has_generation_marks = bool(GENERATION_MARK.search(source))
        self._sandbox = Sandbox(source, today)

    def forget_date(self) -> None:
        """Reset `wrote_date`, which then says whether the template writes the date into texts rendered from now on."""
        self._sandbox.wrote_date = False

    @property
    def wrote_date(self) -> bool:
        return self._sandbox.wrote_date

    def documents(self, conversation: Conversation, *, together: bool) -> list[Document]:
        """Return a conversation's rendered texts with the spans that carry loss; the longest text comes last.

        More than one where the template rewrites earlier turns; not `together`: also where it only drops their
        thoughts. Raises RowError when the template refuses the messages, leaves a part of them out or does not show the
        assistant's turns, UnprovedError when it never does that.
        """
        _ = self._proof
        return self._documents(conversation, together=together)

    def text(self, conversation: Conversation, *, add_generation_prompt: bool = False) -> str:
        """Return a whole conversation as one text; raise RowError when the template refuses the messages."""
        messages, write = self._known(conversation), self._write(conversation)
        text = write(messages, add_generation_prompt=add_generation_prompt)
        check_shown(write, messages, text, self._name)
        return text

    @cached_property
    def _proof(self) -> None:
        """Raise UnprovedError if the template's loss mask is wrong for a simple test conversation of known words."""
        for roles in PROBES:
            words = [f"q{role}{number}" for number, role in enumerate(roles)]
            probe = Conversation([make_message(role, word) for role, word in zip(roles, words, strict=True)])
            try:
                documents = self._documents(probe, together=True)
            except _RefusalError:
                continue
            except UnclearTurnsError as error:
                if "system" in roles:
                    continue  # rows that have one are refused one by one
                raise UnprovedError(*error.cause) from error
            learned = "\n".join(document.text[begin:end] for document in documents for begin, end in document.spans)
            # Each of the assistant's words is learned once (True), every other one never (False).
            if wrong := [word for word in words if learned.count(word) != word.startswith("qassistant")]:
                raise UnprovedError(
                    f"the mask of {self._name} is wrong in {', '.join(wrong)}: of a conversation of "
                    f"{', '.join(words)} it learns ",
                    learned,
                    ". Fix it, or give another one (`chat_template`).",
                )

    def _documents(self, conversation: Conversation, *, together: bool) -> list[Document]:
        messages, write = self._known(conversation), self._write(conversation)
        learned = conversation.learned_turns
        if self._has_generation_marks:
            documents = self._marked(messages, conversation, together=together)
        else:
            turns = Turns(
                write, messages, self._markers, self._name, together=together, writes_think=self._writes_think
            )
            documents = turns.documents(learned)
            # What follows the last learned turn is in no text.
            messages = messages[: learned[-1] + 1] if learned else messages
        check_shown(write, messages, documents[-1].text, self._name)
        return documents

    def _marked(self, messages: list[Message], conversation: Conversation, *, together: bool) -> list[Document]:
        """Return rendered texts with the spans that carry loss, which the template marks by `{% generation %}`.

        Unless `together`, turns whose thoughts the whole text drops are learned each in a text of its own.
        """
        text, spans = self._marked_spans(messages, conversation)
        documents: list[Document] = []
        whole: list[Span] = []
        num_dropped = 0
        for number in conversation.learned_turns:
            span = spans[number]
            thoughts, _ = split_thoughts(messages[number])
            is_dropped = thoughts.strip() not in text[slice(*span)]
            if is_dropped and not together:
                own_text, own_spans = self._marked_spans(messages[: number + 1], conversation)
                documents.append(Document(own_text, (own_spans[number],), 0))
            else:
                whole.append(span)
                num_dropped += is_dropped
        return [*documents, Document(text, tuple(whole), num_dropped)] if whole or not documents else documents

    def _marked_spans(self, messages: list[Message], conversation: Conversation) -> tuple[str, dict[int, Span]]:
        """Return the rendered text, and the span that the template marks for each answer, by the message's index."""
        text, marked = self._run(messages, conversation.tools, **conversation.variables)
        spans: list[Span] = []
        for begin, end in marked:
            if spans and spans[-1][1] == begin:
                begin = spans.pop()[0]  # two blocks of one turn
            spans.append((begin, end))
        turns = [number for number, message in enumerate(messages) if message["role"] == "assistant"]
        if len(spans) != len(turns):
            raise UnclearTurnsError(
                f"{self._name} marks {len(spans)} assistant turns with {{% generation %}} in a conversation that has "
                f"{len(turns)}; fix the template, or remove the marks"
            )
        return text, dict(zip(turns, spans, strict=True))

    def _known(self, conversation: Conversation) -> list[Message]:
        """Return messages with the field names that the template reads; raise RowError for fields that it ignores."""
        self._check_variables(conversation)
        messages = conversation.messages
        parts = {field for message in messages for field in (*THOUGHTS, "tool_calls") if field in message}
        parts |= {"tools"} if conversation.tools else set()
        parts |= {"tool"} if any(message["role"] == "tool" for message in messages) else set()
        unknown = parts - self._words
        known_thoughts = [field for field in THOUGHTS if field in self._words]
        if known_thoughts or self._writes_think:
            unknown -= set(THOUGHTS)
        if unknown:
            raise RowError(
                f"has {listed(sorted(unknown))}, which {self._name} does not render; expected messages of text alone, "
                "or a template (`chat_template`) that knows them"
                + ("" if unknown <= set(THOUGHTS) else f", such as {TOOL_TEMPLATES}")
            )
        if known_thoughts:
            messages = [renamed(message, known_thoughts) for message in messages]
        return [self._call_form(message) for message in messages] if "tool_calls" in parts else messages

    def _check_variables(self, conversation: Conversation) -> None:
        """Raise RowError if a row sets a variable that the chat template does not read, or that the caller sets."""
        settable = self._sandbox.read_variables - GIVEN - self._variables.keys()
        if unread := sorted(conversation.variables.keys() - settable):
            raise RowError(
                f"sets {listed(unread)} in `chat_template_kwargs`, which {self._name} does not take from there; "
                f"expected {listed(sorted(settable)) if settable else 'none'}"
            )

    def _call_form(self, message: Message) -> Message:
        return with_calls_as(message, *self._form) if "tool_calls" in message else message

    @cached_property
    def _form(self) -> tuple[bool, bool]:
        """Two flags of how the template renders a probe's tool calls: arguments as JSON text; missing text as null.

        Some templates put the arguments into a string and fail, or write Python.
        """
        question, call = (
            make_message("user", "qprobe"),
            {"role": "assistant", "content": "", "tool_calls": [PROBE_CALL]},
        )
        for form in ((False, False), (True, False), (False, True), (True, True)):
            try:
                text, _ = self._run([question, with_calls_as(call, *form)], ())
            except RowError:
                continue
            # The first is the question's; arguments must be JSON, neither Python's repr nor escaped a second time.
            if text.count("qprobe") > 1 and "qkey" in text and "{'qkey'" not in text and '\\"qkey' not in text:
                return form
        return False, False

    def _write(self, conversation: Conversation) -> Write:
        """Return a function that renders messages with this conversation's tools and template variables."""

        def write(messages: list[Message], **options: bool) -> str:
            return self._run(messages, conversation.tools, **{**options, **conversation.variables})[0]

        return write

    def _run(self, messages: list[Message], tools: tuple[Tool, ...], **options: Any) -> tuple[str, list[Span]]:
        if any(isinstance(message["content"], list) for message in messages) or self._takes_parts_alone:
            messages = list(map(in_parts, messages))
        return self._run_as_is(messages, tools, **options)

    @cached_property
    def _takes_parts_alone(self) -> bool:
        """True if the template shows texts only as parts of lists, as those of some models that read images do."""
        if "type" not in self._words:
            return False
        question = make_message("user", "qprobe")
        for messages in ([question], [in_parts(question)]):
            try:
                text, _ = self._run_as_is(messages, ())
            except RowError:
                continue
            if "qprobe" in text:
                return messages[0] is not question
        return False

    def _run_as_is(self, messages: list[Message], tools: tuple[Tool, ...], **options: Any) -> tuple[str, list[Span]]:
        variables: dict[str, Any] = {"messages": messages, "tools": list(tools) or None, "documents": None}
        # Special tokens last, so that nothing overrides them.
        variables |= {"add_generation_prompt": False, **options, **self._variables}
        try:
            text, spans = self._sandbox.run(variables)
            text.encode()  # raises for half of a character, which no tokenizer takes
            return text, spans
        except jinja2.TemplateError as error:
            raise _RefusalError(
                f"is refused by {self._name}: ", str(error), "; expected messages that it can render"
            ) from error
        except MemoryError:
            raise
        except Exception as error:  # any error of Python that the template's expressions raise on these messages
            raise _RefusalError(
                f"cannot be rendered by {self._name}: {type(error).__name__}: ",
                str(error),
                "; expected messages that it can render",
            ) from error


class UnprovedError(Exception):
    """Raised when a template's loss mask is wrong for every conversation. parts: as in `QuotingError`."""

    def __init__(self, *parts: str) -> None:
        super().__init__("".join(parts))
        self.parts = parts


class _RefusalError(QuotingError):
    """Raised when a chat template refuses a row's messages (`raise_exception`), or fails on them."""


class Sandbox(ImmutableSandboxedEnvironment):
    """Sandboxed Jinja environment of one chat template, which is untrusted code."""

    def __init__(self, source: str, today: date) -> None:
        """Compile the template. today: date that `strftime_now` returns. Raises jinja2.TemplateSyntaxError."""
        # As Transformers compiles chat templates.
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, loopcontrols])
        self.filters["tojson"] = _to_json
        self.globals |= {"raise_exception": _refuse, "strftime_now": self._strftime_now}
        self.today = today
        self.wrote_date = False
        """True if the chat template has written the current date into a text."""
        self._marked: list[Span] = []
        self._num_characters = 0
        self._template = self.from_string(source)
        self._template.globals = dict(self._template.globals)  # a chain of them is slow to read, for each rendering
        self.read_variables = meta.find_undeclared_variables(self.parse(source)) - self.globals.keys()

    def run(self, variables: dict[str, Any]) -> tuple[str, list[Span]]:
        """Return the rendered text and the spans of its `{% generation %}` blocks.

        Raises jinja2.TemplateError, and what a mistake in the template raises (TypeError, …).
        """
        self._marked, self._num_characters = [], 0
        pieces = []
        # Piece by piece, so that `mark` knows how many characters were written before.
        for piece in self._template.generate(variables):
            pieces.append(piece)
            self._num_characters += len(piece)
        return "".join(pieces), self._marked

    def mark(self, text: str) -> str:
        self._marked.append((self._num_characters, self._num_characters + len(text)))
        return text

    def _strftime_now(self, pattern: str) -> str:
        self.wrote_date = True
        return datetime.combine(self.today, datetime.min.time()).strftime(pattern)


class _GenerationTag(Extension):
    tags = {"generation"}  # noqa: RUF012 - so Jinja declares it

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_mark"), [], [], body).set_lineno(line)

    def _mark(self, caller: Callable[[], str]) -> str:
        assert isinstance(self.environment, Sandbox)
        return self.environment.mark(caller())


def _refuse(message: str) -> None:
    raise jinja2.TemplateError(message)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Return a value as JSON for the template filter `tojson`; Jinja's own filter would escape HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
