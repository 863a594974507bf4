"""Limits on YAML text (size, depth, number of values), checked while parsing, before any object is built.

PyYAML builds nodes by recursion, and merges (`<<`) by copying: text of a few bytes may end the process or fill the
memory. Its events come one after the other, in time in proportion to the text.
"""

import re
from dataclasses import dataclass
from typing import Any

import yaml

from stages.core.errors import RecipeError

MAX_BYTES = 1 << 20
MAX_DEPTH = 50
MAX_VALUES = 20_000
REPLACEMENT_CHARACTER = "\ufffd"
_SURROGATE = re.compile(r"\\u[dD][89a-fA-F][0-9a-fA-F]{2}")


@dataclass
class _Collection:
    """Unfinished YAML mapping or list. num_values: count of it and all values in it, without keys."""

    anchor: str | None
    is_mapping: bool
    num_values: int = 1
    height: int = 1
    num_children: int = 0
    place: str = ""
    """Current position in the YAML mapping or list, for error messages: the last key, or the number of items read."""

    def add(self, num_values: int, height: int, text: str | None) -> None:
        """Count one more key or value of this YAML mapping or list. text: of a scalar; else None."""
        self.num_children += 1
        # In a mapping, keys and values come by turns.
        is_key = self.is_mapping and self.num_children % 2 == 1
        if is_key:
            self.place = text or "?"
        else:
            self.num_values += num_values
            self.height = max(self.height, height + 1)
        if not self.is_mapping:
            self.place = str(self.num_children)


class _Reader:
    """Counter of the values in a YAML text, which is given each event of the YAML parser."""

    def __init__(self) -> None:
        # The text itself, as a list whose only item is the outermost value.
        self._open = [_Collection(None, is_mapping=False)]
        self._known: dict[str, tuple[int, int]] = {}
        self._num_written = 0

    @property
    def path(self) -> str:
        """Dotted path of the YAML value being read, for error messages; long keys are shortened."""
        return ".".join((one.place or "0")[:60] for one in self._open[1:])

    @property
    def num_values(self) -> int:
        """Number of values in the YAML text, in which each alias counts as many values as it stands for."""
        return self._open[0].num_values - 1

    def read(self, event: Any) -> None:
        if isinstance(event, yaml.CollectionStartEvent):
            self._open.append(_Collection(event.anchor, isinstance(event, yaml.MappingStartEvent)))
            self._check_depth(0)
            self._count_written()
        elif isinstance(event, yaml.CollectionEndEvent):
            ended = self._open.pop()
            self._close(ended.anchor, ended.num_values, ended.height, None)
        elif isinstance(event, yaml.ScalarEvent):
            self._count_written()
            self._close(event.anchor, 1, 1, event.value)
        elif isinstance(event, yaml.AliasEvent):
            self._read_alias(event.anchor)

    def _read_alias(self, anchor: str | None) -> None:
        if any(one.anchor == anchor for one in self._open):
            raise RecipeError(f"not a tree of YAML values: `*{anchor}` stands inside of what it names")
        num_values, height = self._known.get(anchor or "", (1, 1))
        self._check_depth(height)
        self._close(None, num_values, height, None)

    def _close(self, anchor: str | None, num_values: int, height: int, text: str | None) -> None:
        if anchor is not None:
            self._known[anchor] = (num_values, height)
        self._open[-1].add(num_values, height, text)

    def _check_depth(self, height: int) -> None:
        if len(self._open) - 1 + height > MAX_DEPTH:
            raise RecipeError(
                f"values lie more than {MAX_DEPTH} deep in one another, which nothing in a recipe or a task does"
            )

    def _count_written(self) -> None:
        self._num_written += 1
        if self._num_written > 2 * MAX_VALUES:  # keys are written, but no values
            raise RecipeError(f"it holds more than {MAX_VALUES:,} values, which no recipe or task does")


def check_bounds(text: str, loader: Any) -> None:
    """Raise RecipeError, with line and field, for invalid, too long, too deep or too much expanding YAML text."""
    if len(text) > MAX_BYTES:
        raise RecipeError(f"it is longer than {MAX_BYTES:,} characters, which nothing in a recipe or a task is")
    _check_escapes(text, loader)
    reader = _Reader()
    try:
        for event in yaml.parse(text, loader):
            reader.read(event)
    except yaml.MarkedYAMLError as error:
        raise _invalid(error.problem_mark, error.problem, reader) from error
    except yaml.YAMLError as error:
        raise RecipeError(f"not a tree of YAML values: {error}") from error
    if reader.num_values > MAX_VALUES:
        raise RecipeError(
            f"its aliases (`*name`) stand for {reader.num_values:,} values, more than {MAX_VALUES:,}; "
            "write out what is meant"
        )


def _check_escapes(text: str, loader: Any) -> None:
    """Raise RecipeError, with field and line, for YAML escapes that are surrogates (half a character).

    They are found by their replacements: for text in one line, as JSON is, the parser itself names neither.
    """
    whole = _SURROGATE.sub(lambda _: r"\ufffd", text)
    reader = _Reader()
    try:
        for event in yaml.parse(whole, loader) if whole != text else ():
            reader.read(event)
            if REPLACEMENT_CHARACTER in (getattr(event, "value", None) or ""):
                raise _invalid(event.start_mark, "half a character, \\uD800 to \\uDFFF; write it as it is", reader)
    except yaml.YAMLError:
        return  # reported for the whole text, by its own check


def _invalid(mark: Any, problem: str | None, reader: _Reader) -> RecipeError:
    line = f"line {mark.line + 1}: " if mark else ""
    field = f" (in {reader.path})" if reader.path else ""
    return RecipeError(f"{line}not valid YAML: {problem}{field}")
