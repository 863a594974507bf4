"""Strict JSON decoding for data files, and a reader that yields the elements of one large JSON list.

Where Python's decoder is silent (repeated keys) or gives up (a number of 5,000 digits), the value becomes
`InvalidJsonValue`, and `flaw_of` says which field of the row is bad.
"""

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TextIO

from stages.core.errors import DataError

MAX_DEPTH = 100
MAX_DIGITS = 4300
"""Largest number of digits of an integer in JSON; converting takes time that grows with the square of the digits."""
NOT_TEXT = re.compile("[\x00\ud800-\udfff]")
"""Characters that texts must not contain, as UTF-8 or tokenizers refuse them: NUL, lone surrogates (`\\ud83d`)."""
PIECE_CHARACTERS = 1 << 20
AHEAD_CHARACTERS = 64


@dataclass(frozen=True)
class InvalidJsonValue:
    """Placeholder for an unusable JSON value; `reason` ends the error message that begins "train.jsonl:17 "."""

    reason: str


def flaw_of(content: object) -> str | None:
    """Return why a JSON value cannot be a dataset row, naming the bad field; None if it can."""
    todo: list[tuple[object, tuple[str, ...]]] = [(content, ())]
    while todo:
        value, path = todo.pop()
        if isinstance(value, str):
            if found := NOT_TEXT.search(value):
                return f"holds {_named(found[0])} in {_column(path)}; expected text that UTF-8 can hold"
        elif isinstance(value, InvalidJsonValue):
            return f"{value.reason} in {_column(path)}"
        elif len(path) >= MAX_DEPTH and isinstance(value, dict | list):
            return f"is nested more than {MAX_DEPTH} deep in `{path[0]}`; expected a row"
        elif isinstance(value, dict):
            todo += [(name, (*path, "a key")) for name in value if isinstance(name, str) and NOT_TEXT.search(name)]
            todo += [(item, (*path, str(name))) for name, item in value.items()]
        elif isinstance(value, list):
            todo += [(item, (*path, str(number))) for number, item in enumerate(value, 1)]
    return None


class JsonList:
    """Reader of a large JSON list that yields one element at a time, without holding the whole file in memory."""

    def __init__(self, stream: TextIO, name: str) -> None:
        self._stream = stream
        self._name = name
        self._text = ""
        self._position = 0
        self._line = 1
        self._line_start = 0  # of the line at the position; negative once that part of the text is gone

    def elements(self) -> Iterator[tuple[int, object]]:
        """Yield each element with the line where it begins; raise DataError with line and column for invalid JSON."""
        self._expect("[")
        if self._next_character() == "]":
            self._expect("]")
        else:
            yield from self._until_the_bracket()
        if self._next_character() is not None:
            raise self._malformed("Extra data after the list", self._position)

    def _until_the_bracket(self) -> Iterator[tuple[int, object]]:
        while True:
            self._next_character()
            line = self._line
            yield line, self._decode()
            if self._expect(",]") == "]":
                return

    def _decode(self) -> object:
        """Decode the list's next element, reading more of the file until the element is complete."""
        while True:
            try:
                value, end = DECODER.raw_decode(self._text, self._position)
            except RecursionError as error:
                raise self._malformed("Nested too deeply to be read", self._position) from error
            except json.JSONDecodeError as error:
                if not self._read_more():
                    raise self._malformed(error.msg, error.pos) from error
                continue
            if self._text[end : end + AHEAD_CHARACTERS].lstrip()[:1] not in (",", "]") and self._read_more():
                continue  # a number may go on
            self._advance(end)
            return value

    def _next_character(self) -> str | None:
        """Return the file's next character that is not white space and move to it; None at the end of the file."""
        while True:
            rest = self._text[self._position : self._position + AHEAD_CHARACTERS]
            stripped = rest.lstrip()
            self._advance(self._position + len(rest) - len(stripped))
            if stripped:
                return stripped[0]
            if not rest and not self._read_more():
                return None

    def _expect(self, characters: str) -> str:
        found = self._next_character()
        if found is None or found not in characters:
            raise self._malformed(f"Expecting {' or '.join(map(repr, characters))}", self._position)
        self._advance(self._position + 1)
        return found

    def _advance(self, end: int) -> None:
        self._line += self._text.count("\n", self._position, end)
        self._line_start = self._start_of_line(end)
        self._position = end

    def _start_of_line(self, position: int) -> int:
        newline = self._text.rfind("\n", self._position, position)
        return self._line_start if newline < 0 else newline + 1

    def _read_more(self) -> bool:
        # At least doubled, so that decoding a long element from its beginning again stays linear in all.
        piece = self._stream.read(max(PIECE_CHARACTERS, len(self._text) - self._position))
        if not piece:
            return False
        self._text = self._text[self._position :] + piece
        self._line_start -= self._position
        self._position = 0
        return True

    def _malformed(self, message: str, position: int) -> DataError:
        line = self._line + self._text.count("\n", self._position, position)
        column = position - self._start_of_line(position) + 1
        return DataError(f"{self._name}:{line} is not valid JSON: {message} at column {column}; correct the file")


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
    return InvalidJsonValue(f"has the key `{_printable(repeated)}` twice")


def _integer(digits: str) -> object:
    return int(digits) if len(digits) <= MAX_DIGITS else InvalidJsonValue(f"has a number of {len(digits)} digits")


DECODER = json.JSONDecoder(object_pairs_hook=_object, parse_int=_integer)
"""JSON decoder that returns `InvalidJsonValue` for objects with a repeated key and for integers that are too long."""
