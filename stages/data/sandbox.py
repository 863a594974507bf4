"""Runs a chat template, which is code that came with a model: in Jinja's immutable sandbox, on a fixed date, in limits.

A template finds here what Transformers gives it (`raise_exception`, `strftime_now`, `tojson`, `{% generation %}`, loop
controls) and nothing else. Whoever wrote it, a rendering ends: loops, macros and whatever makes long texts are counted.
"""

from __future__ import annotations

import functools
import json
import re
import time
from collections.abc import Callable
from datetime import date, datetime
from typing import Any

import jinja2
from jinja2 import meta, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context, Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

Span = tuple[int, int]
"""Begin and end, in characters."""

MAX_CPU_SECONDS = 10.0
"""Of one rendering. CPU time of this thread: a busy machine decides nothing."""

MAX_CHARACTERS = 1 << 26
"""Of what a template writes, of every text it makes on the way, and of numbers that say how long something is to be."""

MAX_BITS = 1 << 16
"""Of a product or a power of integers."""

WIDE_FORMAT = re.compile(r"\d{7}")


class TemplateLimitError(Exception):
    """What a rendering did beyond its limits; goes on from "the model's chat template "."""


class Sandbox(ImmutableSandboxedEnvironment):
    """The environment of one template."""

    intercepted_binops = frozenset({"*", "**", "%"})

    def __init__(self, source: str, today: date) -> None:
        """`today` is the date that `strftime_now` writes. Raises jinja2.TemplateSyntaxError."""
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, loopcontrols])
        self.filters = {name: _limited(function) for name, function in self.filters.items()}
        self.filters["tojson"] = _limited(_to_json)
        self.filters |= {_Counting.step: self._count_step, _Counting.measured: _measured}
        self.globals |= {"raise_exception": _refuse, "strftime_now": self._strftime_now}
        self.today = today
        self.wrote_date = False
        """Whether a rendering asked for the date."""
        self._marked: list[Span] = []
        self._num_characters = 0
        self._cpu_limit_s = 0.0
        self._template = self.from_string(source)
        self._template.globals = dict(self._template.globals)  # a chain of them is slow to read, for each rendering
        self.read_variables = meta.find_undeclared_variables(self._parse(source, None, None)) - self.globals.keys()
        """Names that the template takes from outside."""

    def run(self, variables: dict[str, Any]) -> tuple[str, list[Span]]:
        """What the template writes, and what of it lies in `{% generation %}` blocks.

        Raises TemplateLimitError, jinja2.TemplateError, and what a mistake in the template raises (TypeError, …).
        """
        self._marked, self._num_characters = [], 0
        self._cpu_limit_s = time.thread_time() + MAX_CPU_SECONDS
        pieces = []
        for piece in self._template.generate(variables):
            pieces.append(piece)
            self._num_characters += len(piece)
            if self._num_characters > MAX_CHARACTERS:
                raise TemplateLimitError(f"writes more than {MAX_CHARACTERS} characters")
        return "".join(pieces), self._marked

    def mark(self, text: str) -> str:
        """`text` is about to be written, and lies in a `{% generation %}` block."""
        self._marked.append((self._num_characters, self._num_characters + len(text)))
        return text

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        template: nodes.Template = _Counting().visit(super()._parse(source, name, filename))
        template.set_environment(self)
        return template

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """Jinja calls this for `intercepted_binops`."""
        if operator in ("*", "**"):
            _check_product(operator, left, right)
        if operator == "%" and isinstance(left, str):
            _check_format(left)
        return _measured(super().call_binop(context, operator, left, right))

    def call(self, context: Context, obj: Any, *args: Any, **kwargs: Any) -> Any:
        """Jinja calls this for every call in a template."""
        method = getattr(obj, "__wrapped__", obj)  # Jinja wraps `str.format`
        if not isinstance(obj, Macro):  # what a macro does with a number is seen there
            _check_numbers(args, kwargs)
        if isinstance(text := getattr(method, "__self__", None), str) and method.__name__.startswith("format"):
            _check_format(text)
        return _measured(super().call(context, obj, *args, **kwargs))

    @jinja2.pass_context  # so that Jinja takes it for no constant
    def _count_step(self, *_: Any) -> None:
        if time.thread_time() > self._cpu_limit_s:
            raise TemplateLimitError(f"does not end: it ran for {MAX_CPU_SECONDS:g} s on one conversation")

    def _strftime_now(self, pattern: str) -> str:
        self.wrote_date = True
        return datetime.combine(self.today, datetime.min.time()).strftime(pattern)


class _Counting(NodeTransformer):
    """Puts into a template's loops and macros what counts them, and around texts that it joins what measures them.

    Both are filters: the sandbox looks at every call, and at every operator that it intercepts.
    """

    step = "__step"
    measured = "__measured"

    def visit_For(self, node: nodes.For) -> nodes.Node:  # noqa: N802
        return self._counted(node)

    def visit_Macro(self, node: nodes.Macro) -> nodes.Node:  # noqa: N802
        return self._counted(node)

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:  # noqa: N802
        self.generic_visit(node)
        return _filtered(node, self.measured, node.lineno)

    def visit_Add(self, node: nodes.Add) -> nodes.Node:  # noqa: N802
        self.generic_visit(node)
        return _filtered(node, self.measured, node.lineno)

    def visit_AssignBlock(self, node: nodes.AssignBlock) -> nodes.Node:  # noqa: N802
        self.generic_visit(node)
        node.filter = _filtered(node.filter, "string", node.lineno)  # filters measure
        return node

    def _counted(self, node: nodes.For | nodes.Macro) -> nodes.Node:
        self.generic_visit(node)
        step = _filtered(nodes.Const(None), self.step, node.lineno)
        node.body.insert(0, nodes.ExprStmt(step, lineno=node.lineno))
        return node


class _GenerationTag(Extension):
    tags = {"generation"}  # noqa: RUF012 - so Jinja declares it

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_mark"), [], [], body).set_lineno(line)

    def _mark(self, caller: Callable[[], str]) -> str:
        assert isinstance(self.environment, Sandbox)
        return self.environment.mark(caller())


def _filtered(node: nodes.Expr | None, name: str, line: int) -> nodes.Filter:
    return nodes.Filter(node, name, [], [], None, None, lineno=line)


def _limited(function: Callable[..., Any]) -> Callable[..., Any]:
    """A filter that neither is asked for so many, nor makes texts beyond the limit.

    What it is applied to may be any number: a timestamp in the arguments of a call asks for nothing.
    """
    num_given = 2 if hasattr(function, "jinja_pass_arg") else 1

    @functools.wraps(function)  # also what marks a filter as one that wants the context
    def limited(*args: Any, **kwargs: Any) -> Any:
        _check_numbers(args[num_given:], kwargs)
        return _measured(function(*args, **kwargs))

    return limited


def _measured(value: Any) -> Any:
    if isinstance(value, str | list | tuple) and len(value) > MAX_CHARACTERS:
        raise TemplateLimitError(f"makes a text or list of more than {MAX_CHARACTERS} characters")
    return value


def _check_numbers(args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    if any(isinstance(value, int) and value > MAX_CHARACTERS for value in (*args, *kwargs.values())):
        raise TemplateLimitError(f"asks for more than {MAX_CHARACTERS} characters")


def _check_product(operator: str, left: Any, right: Any) -> None:
    if isinstance(left, int) and isinstance(right, int):
        num_bits = left.bit_length() * (max(right, 0) if operator == "**" else 1) + right.bit_length()
        if num_bits > MAX_BITS:
            raise TemplateLimitError(f"computes a number of more than {MAX_BITS} bits")
        return
    for sequence, times in ((left, right), (right, left)):
        if isinstance(sequence, str | list | tuple) and isinstance(times, int):
            _check_numbers((len(sequence) * times,), {})


def _check_format(pattern: str) -> None:
    if WIDE_FORMAT.search(pattern):
        raise TemplateLimitError(f"formats a text wider than {MAX_CHARACTERS} characters allow")


def _refuse(message: str) -> None:
    raise jinja2.TemplateError(message)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Jinja's own escapes HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
