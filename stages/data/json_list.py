"""The elements of a JSON list, one at a time: no more of the text is held than the element at hand."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import TextIO

from stages.core.errors import DataError
from stages.data.json_values import DECODER

PIECE_CHARACTERS = 1 << 20
AHEAD_CHARACTERS = 64


class JsonList:
    """Reads `stream`, whose text is one JSON list; `name` is what errors call it."""

    def __init__(self, stream: TextIO, name: str) -> None:
        self._stream = stream
        self._name = name
        self._text = ""
        self._position = 0
        self._line = 1
        self._line_start = 0  # of the line at the position; negative once that part of the text is gone

    def elements(self) -> Iterator[tuple[int, object]]:
        """Each element with the line it begins at. Raises DataError that names line and column of what is wrong."""
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
        """The element at the position. It may be cut off by the end of the text: then read on and try again."""
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
        """Moves to the next character that is not a space and returns it, or None at the end of the file."""
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
        return DataError(f"{self._name}:{line} is not valid JSON: {message} at column {column}; mend the file")
