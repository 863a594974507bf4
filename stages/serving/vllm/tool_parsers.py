"""Parsers by which vLLM reads tool calls from answers, chosen from the model's chat template.

Without one, vLLM refuses requests with tools.
"""

import ast
import difflib
from functools import cache
from pathlib import Path
from typing import Any

from stages.models.call_formats import call_format, templates_of
from stages.models.model_folder import tokens_of


def parser_of(model: Path, python: Path) -> str | None:
    """Return vLLM's tool call parser for a model's chat template, or None. python: of vLLM's environment."""
    parser = call_format(templates_of(model), tokens_of(model))
    known = known_parsers(python)
    return parser if known is None or parser in known else None


def parser_problem(name: Any, python: Path) -> str | None:
    """Return an error if vLLM has no tool call parser of this name, else None."""
    known = known_parsers(python)
    if known is None or name in known:
        return None
    close = difflib.get_close_matches(str(name), known, n=2)
    meant = f"did you mean {' or '.join(close)}? " if close else ""
    return f"vLLM has no such parser; {meant}It has {', '.join(sorted(known))}"


@cache
def known_parsers(python: Path) -> frozenset[str] | None:
    """Return the installed vLLM's tool call parsers, read from its source, as an import takes seconds; or None."""
    for file in python.parent.parent.glob("lib/python3*/site-packages/vllm/tool_parsers/__init__.py"):
        for statement in ast.parse(file.read_text("utf-8")).body:
            if isinstance(statement, ast.Assign) and isinstance(statement.value, ast.Dict):
                keys = [key.value for key in statement.value.keys if isinstance(key, ast.Constant)]
                names = frozenset(key for key in keys if isinstance(key, str))
                if "hermes" in names:
                    return names
    return None
