"""A conversation with a served model in a terminal: questions from stdin, answers as they are made.

An empty line is passed over, `/new` begins another conversation, and the end of the input (Ctrl-D) ends it. What a
model says may hold control characters, which a terminal would obey: they are shown as escapes.
"""

from __future__ import annotations

import sys

from stages.core.errors import ServerError
from stages.core.lines import visible
from stages.serving.client import Client

NEW = "/new"
PROMPT = "> "


def chat(client: Client) -> None:
    """Go on until the end of the input. What the server refuses is said, and not part of the conversation."""
    messages: list[dict[str, str]] = []
    while (question := _asked()) is not None:
        if question == NEW:
            messages = []
            continue
        if not question:
            continue
        messages.append({"role": "user", "content": question})
        try:
            answer = _answered(client, messages)
        except ServerError as error:  # too long, or no chat template: the server says so, and goes on
            messages.pop()
            print(error, file=sys.stderr, flush=True)
        else:
            messages.append({"role": "assistant", "content": answer})


def _asked() -> str | None:
    if sys.stdin.isatty():
        import readline  # noqa: F401  (by it, arrow keys edit a line and bring earlier ones back)
    try:
        return input(PROMPT if sys.stdin.isatty() else "").strip()
    except EOFError:
        return None


def _answered(client: Client, messages: list[dict[str, str]]) -> str:
    """Print the answer as it comes; returns the whole."""
    parts = []
    for part in client.chat(messages):
        parts.append(part)
        print(visible(part), end="", flush=True)
    print(flush=True)
    return "".join(parts)
