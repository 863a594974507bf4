"""Runs a chat template, which is code that came with a model: in Jinja's immutable sandbox, on a fixed date.

A template finds here what Transformers gives it (`raise_exception`, `strftime_now`, `tojson`, `{% generation %}`, loop
controls) and nothing else. Its time and memory are those of the process that runs it: `template_program` limits both.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import date, datetime
from typing import Any

import jinja2
from jinja2 import meta, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from stages.data.documents import Span


class Sandbox(ImmutableSandboxedEnvironment):
    """The environment of one template."""

    def __init__(self, source: str, today: date) -> None:
        """`today` is the date that `strftime_now` writes. Raises jinja2.TemplateSyntaxError."""
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, loopcontrols])
        self.filters["tojson"] = _to_json
        self.globals |= {"raise_exception": _refuse, "strftime_now": self._strftime_now}
        self.today = today
        self.wrote_date = False
        """Whether a rendering asked for the date."""
        self._marked: list[Span] = []
        self._num_characters = 0
        self._template = self.from_string(source)
        self._template.globals = dict(self._template.globals)  # a chain of them is slow to read, for each rendering
        self.read_variables = meta.find_undeclared_variables(self.parse(source)) - self.globals.keys()
        """Names that the template takes from outside."""

    def run(self, variables: dict[str, Any]) -> tuple[str, list[Span]]:
        """Return what the template writes, and the spans of it that lie in `{% generation %}` blocks.

        Raises jinja2.TemplateError, and what a mistake in the template raises (TypeError, …).
        """
        self._marked, self._num_characters = [], 0
        pieces = []
        for piece in self._template.generate(variables):
            pieces.append(piece)
            self._num_characters += len(piece)
        return "".join(pieces), self._marked

    def mark(self, text: str) -> str:
        """Note that `text`, which is about to be written, lies in a `{% generation %}` block."""
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
    """Return `value` as JSON; Jinja's own filter escapes HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
