"""What a template writes for the beginnings of one conversation: counted, and kept while others will ask for the same.

To prove which tokens the assistant says, each of its turns is rendered with all before it: work that grows with the
square of the turns. A conversation that would take too long is refused by name, most often before it is begun.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from stages.data.messages import Message, RowError

Write = Callable[..., str]
"""(messages, add_generation_prompt, **variables of the template) → text. Raises RowError."""

MAX_MESSAGES = 1 << 21
"""Of one conversation, in all renderings: a thousand turns, and on a usual core ten seconds."""
MAX_KEPT_CHARACTERS = 1 << 26


class Renderings:
    """Writes as `write` does. keep: whether the same beginnings will be asked for again, by other documents."""

    def __init__(self, write: Write, messages: Sequence[Message], *, keep: bool) -> None:
        self._write = write
        self._length = len(messages)
        self._num_messages = 0
        self._may_keep = MAX_KEPT_CHARACTERS if keep else 0
        self._kept: dict[tuple[object, ...], str] = {}

    def __call__(self, messages: Sequence[Message], **options: bool) -> str:
        """Raises RowError when that makes too many, and what `write` raises."""
        self.check(len(messages))
        self._num_messages += len(messages)
        return self._write(list(messages), **options)

    def check(self, num_messages: int) -> None:
        """Raises RowError when so many messages more are too many."""
        if self._num_messages + num_messages > MAX_MESSAGES:
            raise RowError(
                f"has {self._length:,} messages: to prove what the assistant says, each turn is rendered with all "
                f"before it, and more than {MAX_MESSAGES:,} would be in all; split the conversation, give a template "
                "(`chat_template`) with {% generation %} marks, or learn everything (`train_on: all`)"
            )

    def beginning(self, messages: Sequence[Message], number: int, **options: bool) -> str:
        """The first `number` messages of the conversation, which are the same whenever they are to be kept."""
        key = (number, *options.items())
        text = self._kept.get(key) or self(messages[:number], **options)
        if key not in self._kept and len(text) <= self._may_keep:
            self._kept[key] = text
            self._may_keep -= len(text)
        return text
