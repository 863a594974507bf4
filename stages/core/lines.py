"""Lines for people: at a terminal as they are; elsewhere, where they are read later, each begins with its time."""

from __future__ import annotations

import time
from typing import TextIO


def say(text: str, stream: TextIO) -> None:
    """Print a text of one or more lines at once."""
    if not stream.isatty():
        now = time.strftime("%H:%M:%S")
        text = "\n".join(f"{now} {line}" for line in text.splitlines())
    print(text, file=stream, flush=True)
