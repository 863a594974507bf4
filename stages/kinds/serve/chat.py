"""Terminal chat with one served model, or with two side by side; answers are printed as they are generated.

`/new` begins another conversation, Ctrl-D ends the chat. Control characters in answers are escaped.
"""

import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from stages.core.errors import DataError, ServerError
from stages.core.files import read_json_object
from stages.core.lines import visible
from stages.data.media.addresses import FORMS
from stages.models.media import NOUNS, MediaError, MediaKind
from stages.serving.client import Client
from stages.serving.pictures import Limits, address_for

NEW = "/new"
PROMPT = "> "


@dataclass
class Conversation:
    """Conversation of the terminal chat with one served model.

    label: name shown where there are two models. options: sampling parameters. system: first message, or None. media:
    parts of a message that stand before the first question.
    """

    client: Client
    label: str
    options: Mapping[str, Any] = field(default_factory=dict)
    system: str | None = None
    media: Sequence[dict[str, Any]] = ()
    messages: list[dict[str, Any]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.begin()

    def begin(self) -> None:
        self.messages = [] if self.system is None else [{"role": "system", "content": self.system}]

    def ask(self, question: str) -> None:
        """Send a question and print the answer as it arrives; one that the server rejects is removed again."""
        self.messages.append({"role": "user", "content": self._content(question)})
        parts: list[str] = []
        try:
            for part in self.client.chat(self.messages, **self.options):
                parts.append(part)
                print(visible(part), end="", flush=True)
        except ServerError as error:  # too long, or no chat template: the next question may be answered
            self.messages.pop()
            print("\n" if parts else "", end="", flush=True)
            print(error, file=sys.stderr, flush=True)
        else:
            self.messages.append({"role": "assistant", "content": "".join(parts)})
            print(flush=True)

    def _content(self, question: str) -> str | list[dict[str, Any]]:
        if not self.media or any(message["role"] == "user" for message in self.messages):
            return question
        return [*self.media, {"type": "text", "text": question}]


def read_medium(kind: MediaKind, path: Path, limits: Sequence[Limits]) -> dict[str, Any]:
    """Return a medium's file as a part of a message. limits: of the servers that get it.

    Raises DataError for one that a dataset's row could not have, or that a server refuses.
    """
    try:
        with path.open("rb") as file:
            data = file.read(FORMS[kind].max_bytes + 1)
        FORMS[kind].inspect(data, False)
        for one in limits:
            address_for(kind, data, one)
        return {"type": f"{kind}_url", f"{kind}_url": {"url": FORMS[kind].address(data)}}
    except (OSError, MediaError) as error:
        what = f"cannot be read: {error.strerror}" if isinstance(error, OSError) else error
        raise DataError(f"the {NOUNS[kind]} {path} {what}") from error


def chat(conversations: Sequence[Conversation]) -> None:
    """Read questions from stdin until its end, and send each to every model."""
    while (question := _read_question()) is not None:
        for conversation in conversations if question else ():
            if question == NEW:
                conversation.begin()
                continue
            if len(conversations) > 1:
                print(f"[{conversation.label}]", flush=True)
            conversation.ask(question)


def sampling_of(model: Path, temperature: float | None) -> tuple[dict[str, float], str]:
    """Return the sampling parameters for a terminal chat, and a phrase that names them and their origin.

    Without the person's or generation_config.json's temperature greedy: servers default to 1.
    """
    if temperature is not None:
        return {"temperature": temperature}, f"at temperature {temperature:g}"
    file = model / "generation_config.json"
    config = read_json_object(file) if file.is_file() else {}
    default = 1.0 if config.get("do_sample") is True else None  # Transformers' own default where it samples
    named = _number(config.get("temperature"), default)
    if named is None or config.get("do_sample") is False:
        return {"temperature": 0.0}, "greedily (temperature 0)"
    top_p = _number(config.get("top_p"), None)
    return (
        {"temperature": named, **({} if top_p is None else {"top_p": top_p})},
        f"at temperature {named:g}{'' if top_p is None else f' and top_p {top_p:g}'}, by its generation_config.json",
    )


def _number(value: Any, default: float | None) -> float | None:
    is_number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value) and value >= 0
    return float(value) if is_number else default


def _read_question() -> str | None:
    if sys.stdin.isatty():
        import readline  # noqa: F401  (makes arrow keys edit the line and recall earlier ones)
    try:
        return input(PROMPT if sys.stdin.isatty() else "").strip()
    except EOFError:
        return None
