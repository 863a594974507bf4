"""JSON text → values, and what in a value no text can be made of: where Python is silent, or gives up, a row is bad."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass

MAX_DEPTH = 100
MAX_DIGITS = 4300
"""Python converts no longer integers: it would take time that grows with their square."""
NOT_TEXT = re.compile("[\x00\ud800-\udfff]")
"""What no tokenizer takes: NUL, and halves of characters, which JSON can write (`\\ud83d`) and UTF-8 cannot."""


@dataclass(frozen=True)
class Unusable:
    """Stands where a text holds a value that cannot be taken as it is; `reason` goes on from "train.jsonl:17 "."""

    reason: str


def flaw_of(content: object) -> str | None:
    """Why a row cannot be made of this value, naming the place within it; None where it can."""
    todo: list[tuple[object, tuple[str, ...]]] = [(content, ())]
    while todo:
        value, path = todo.pop()
        if isinstance(value, str):
            if found := NOT_TEXT.search(value):
                return f"holds {_named(found[0])} in {_column(path)}; expected text that UTF-8 can hold"
        elif isinstance(value, Unusable):
            return f"{value.reason} in {_column(path)}"
        elif len(path) >= MAX_DEPTH and isinstance(value, dict | list):
            return f"is nested more than {MAX_DEPTH} deep in `{path[0]}`; expected a row"
        elif isinstance(value, dict):
            todo += [(name, (*path, "a key")) for name in value if isinstance(name, str) and NOT_TEXT.search(name)]
            todo += [(item, (*path, str(name))) for name, item in value.items()]
        elif isinstance(value, list):
            todo += [(item, (*path, str(number))) for number, item in enumerate(value, 1)]
    return None


def _named(character: str) -> str:
    if character == "\x00":
        return "a NUL character"
    return f"half of a character (\\u{ord(character):04x}, a surrogate without the other one)"


def _column(path: tuple[str, ...]) -> str:
    return f"`{_printable('.'.join(path))}`" if path else "the row"


def _printable(text: str) -> str:
    return text.encode("utf-8", "backslashreplace").decode()


def _object(pairs: list[tuple[str, object]]) -> object:
    found = dict(pairs)
    if len(found) == len(pairs):
        return found
    names = [name for name, _ in pairs]
    repeated = next(name for name in names if names.count(name) > 1)
    return Unusable(f"has the key `{_printable(repeated)}` twice")


def _integer(digits: str) -> object:
    return int(digits) if len(digits) <= MAX_DIGITS else Unusable(f"has a number of {len(digits)} digits")


DECODER = json.JSONDecoder(object_pairs_hook=_object, parse_int=_integer)
"""As `json.loads`, with `Unusable` in place of an object that has a key twice, and of an endless number."""
