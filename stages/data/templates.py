"""A conversation → its text under a chat template, and which characters of it the assistant said.

Templates that mark the assistant's part with `{% generation %}` are believed. For all others a turn begins where the
prompt before it ends (the messages so far, with the generation prompt) and ends where the conversation up to and
including it ends; both must be beginnings of the whole text, which is checked. What ends the turn is learned too.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jinja2
from transformers.utils.chat_template_utils import render_jinja_template

from stages.core.errors import DataError
from stages.data.documents import Conversation
from stages.data.messages import THOUGHTS, Message, RowError, Tool, listed

Span = tuple[int, int]
"""Begin and end, in characters."""

GENERATION_MARK = re.compile(r"\{%-?\s*generation\s*-?%\}")


@dataclass(frozen=True)
class Rendered:
    """A document's text, and the spans of it that carry loss, in order."""

    text: str
    spans: tuple[Span, ...]
    is_plain: bool = False
    """Without a template: the tokenizer's own special tokens go around it."""


class ChatTemplate:
    """Renders conversations with one Jinja template."""

    def __init__(self, source: str, special_tokens: dict[str, str], markers: Sequence[str], name: str) -> None:
        """`special_tokens` are the template's variables (`bos_token`, …), `markers` the strings of all special tokens,
        `name` is what errors call the template. Raises DataError for a template that is not Jinja.
        """
        self._source = source
        self._variables = special_tokens
        self._markers = tuple(markers)
        self._name = name
        self._has_generation_marks = bool(GENERATION_MARK.search(source))
        try:
            render_jinja_template([], chat_template=source)
        except jinja2.TemplateSyntaxError as error:
            raise DataError(f"{name} is not a Jinja template: {error.message} in line {error.lineno}") from error

    def render(self, conversation: Conversation) -> Rendered:
        """The text, with loss on what the assistant says after the prompt.

        Raises RowError when the template refuses the messages, DataError when it does not show the assistant's turns.
        """
        self._check_support(conversation)
        if self._has_generation_marks:
            text, spans = self._render_marked(conversation)
        else:
            text, spans = self._render_prefixes(conversation)
        turns = [number for number, message in enumerate(conversation.messages) if message["role"] == "assistant"]
        learned = [
            span
            for number, span in zip(turns, spans, strict=True)
            if number >= conversation.num_prompt_messages and number not in conversation.unlearned
        ]
        return Rendered(text, tuple(learned))

    def render_text(self, conversation: Conversation, *, add_generation_prompt: bool = False) -> str:
        """The text alone. Raises RowError when the template refuses the messages."""
        self._check_support(conversation)
        return self._text(conversation.messages, conversation.tools, add_generation_prompt=add_generation_prompt)

    def ends_turns(self, rendered: Rendered) -> bool:
        """Whether what is learned of each turn ends with a special token, so that a model learns to stop."""
        return all(rendered.text[begin:end].rstrip().endswith(self._markers) for begin, end in rendered.spans)

    def _check_support(self, conversation: Conversation) -> None:
        """A template that does not know of a part leaves it out in silence."""
        parts = {field for message in conversation.messages for field in (*THOUGHTS, "tool_calls") if field in message}
        parts |= {"tools"} if conversation.tools else set()
        parts |= {"tool"} if any(message["role"] == "tool" for message in conversation.messages) else set()
        unknown = sorted(part for part in parts if not re.search(rf"\b{part}\b", self._source))
        if unknown:
            raise RowError(
                f"has {listed(unknown)}, which {self._name} does not render; expected messages of text alone, or a "
                "template (`chat_template`) that knows them"
            )

    def _render_marked(self, conversation: Conversation) -> tuple[str, list[Span]]:
        messages = conversation.messages
        texts, marked = self._jinja(messages, conversation.tools, return_assistant_tokens_mask=True)
        spans = [(begin, end) for begin, end in marked[0]]
        if len(spans) != _num_turns(messages):
            raise DataError(
                f"{self._name} marks {len(spans)} assistant turns with {{% generation %}} in a conversation that has "
                f"{_num_turns(messages)}; mend the template, or remove the marks"
            )
        return texts[0], spans

    def _render_prefixes(self, conversation: Conversation) -> tuple[str, list[Span]]:
        text = self._text(conversation.messages, conversation.tools)
        conversation = self._without_dropped_thoughts(conversation, text)
        spans = []
        for number, message in enumerate(conversation.messages):
            if message["role"] == "assistant":
                spans.append(self._turn(text, conversation, number))
        return text, spans

    def _without_dropped_thoughts(self, conversation: Conversation, text: str) -> Conversation:
        """The same without thoughts that the whole text does not have, if it needs none of them.

        A template that drops the thoughts before the last question shows them in a beginning that ends before it.
        """
        messages = [
            {key: value for key, value in message.items() if key not in THOUGHTS or value.strip() in text}
            for message in conversation.messages
        ]
        if messages != conversation.messages and self._text(messages, conversation.tools) == text:
            return replace(conversation, messages=messages)
        return conversation

    def _turn(self, text: str, conversation: Conversation, number: int) -> Span:
        """Where message `number`, an assistant's, lies in the whole text."""
        messages, tools = conversation.messages, conversation.tools
        before = self._text(messages[:number], tools, add_generation_prompt=True)
        if not text.startswith(before):
            raise self._not_a_prefix(before, text, number)
        if number == len(messages) - 1:
            return len(before), self._without_blank_end(text, len(before))
        upto = self._text(messages[: number + 1], tools)
        if text.startswith(upto):
            return len(before), self._without_blank_end(upto, len(before))
        return len(before), self._marked_end(text, len(before), upto, number)

    def _without_blank_end(self, text: str, begin: int) -> int:
        """The end of a turn that ends with `text`: line breaks after its last special token are never generated."""
        stripped = text.rstrip()
        return len(stripped) if len(stripped) > begin and stripped.endswith(self._markers) else len(text)

    def _marked_end(self, text: str, begin: int, upto: str, number: int) -> int:
        """The end of a turn that is written otherwise when it is the last (models that think drop their old thoughts).

        The special token that ends it as the last one ends it here, too.
        """
        stripped = upto.rstrip()
        marker = next((marker for marker in self._markers if stripped.endswith(marker)), None)
        position = -1 if marker is None else text.find(marker, begin)
        if marker is None or position < 0:
            raise self._not_a_prefix(upto, text, number)
        return position + len(marker)

    def _not_a_prefix(self, before: str, text: str, number: int) -> DataError:
        shared = next((i for i, pair in enumerate(zip(before, text, strict=False)) if pair[0] != pair[1]), len(text))
        return DataError(
            f"{self._name} does not show which tokens the assistant says: rendered up to message {number + 1}, the "
            f"conversation reads …{before[shared : shared + 60]!r} where the whole one reads "
            f"…{text[shared : shared + 60]!r}. Give a template (`chat_template`) that puts the assistant's part into "
            "{% generation %} … {% endgeneration %}, or learn everything (`train_on: all`)."
        )

    def _text(self, messages: list[Message], tools: tuple[Tool, ...], *, add_generation_prompt: bool = False) -> str:
        texts, _ = self._jinja(messages, tools, add_generation_prompt=add_generation_prompt)
        return texts[0]

    def _jinja(
        self, messages: list[Message], tools: tuple[Tool, ...], **options: Any
    ) -> tuple[list[str], list[list[Span]]]:
        options |= self._variables
        try:
            return render_jinja_template([messages], list(tools) or None, chat_template=self._source, **options)
        except jinja2.TemplateError as error:
            raise RowError(f"is refused by {self._name}: {error}; expected messages that it can render") from error


def load_chat_template(tokenizer: Any, tokenizer_folder: Path, recipe_template: Path | None) -> ChatTemplate:
    """The recipe's template, or the tokenizer's own. Raises DataError when there is none."""
    special_tokens = {name: str(token) for name, token in tokenizer.special_tokens_map.items()}
    markers = [str(token) for token in tokenizer.added_tokens_decoder.values() if token.special]
    if recipe_template is not None:
        if not recipe_template.is_file():
            raise DataError(f"there is no chat template {recipe_template}; `chat_template` names a Jinja file")
        source, name = recipe_template.read_text(encoding="utf-8"), f"the chat template {recipe_template.name}"
    elif tokenizer.chat_template:
        source, name = tokenizer.get_chat_template(), "the model's chat template"
    else:
        raise DataError(
            f"the data are conversations, but the tokenizer in {tokenizer_folder} has no chat template. Name a Jinja "
            "file in the recipe (`data: {chat_template: chatml.jinja}`), or use a model that has one."
        )
    return ChatTemplate(source, special_tokens, markers, name)


def _num_turns(messages: list[Message]) -> int:
    return sum(message["role"] == "assistant" for message in messages)
