"""Readers of JSON objects from outside, with errors of one sentence."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from stages.core.errors import ModelError


def read_json_object(path: Path) -> dict[str, Any]:
    """Return the JSON object in a file. Raises ModelError if it is unreadable, not UTF-8, or no object."""
    try:
        text = path.read_bytes().decode("utf-8")
    except (OSError, ValueError) as error:
        raise ModelError(f"{path} cannot be read as JSON in UTF-8: {error}; fetch or save this file again") from error
    return parse_json_object(text, str(path))


def parse_json_object(text: str, where: str) -> dict[str, Any]:
    """Return the JSON object in a text that was read from `where`. Raises ModelError when it is none."""
    try:
        content = json.loads(text)
    except ValueError as error:
        raise ModelError(f"{where} cannot be read as JSON: {error}; fetch or save this file again") from error
    except RecursionError as error:
        raise ModelError(f"{where} is nested too deeply to be read; fetch or save this file again") from error
    if not isinstance(content, dict):
        raise ModelError(f"{where} holds a JSON {type(content).__name__}, not an object; fetch or save this file again")
    return content
