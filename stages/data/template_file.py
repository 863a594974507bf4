"""Reads the Jinja file that a recipe names as `chat_template`."""

from __future__ import annotations

from pathlib import Path

import jinja2

from stages.core.errors import DataError
from stages.data.config import DEFAULT_DATE
from stages.data.sandbox import Sandbox

MAX_BYTES = 1 << 20
"""The longest published templates have some 20 KiB."""


def read_template(path: Path) -> str:
    """Its text. Raises DataError unless it is a file of a reasonable size that holds a Jinja template."""
    if not path.is_file():
        raise DataError(f"there is no chat template {path}; `chat_template` names a Jinja file")
    if path.stat().st_size > MAX_BYTES:
        raise DataError(f"the chat template {path} is longer than {MAX_BYTES:,} bytes; name a Jinja file")
    try:
        source = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise DataError(f"the chat template {path} is not UTF-8 text: {error.reason}; name a Jinja file") from error
    if not source.strip():
        raise DataError(f"the chat template {path} is empty; write one, or leave out `chat_template`")
    try:
        Sandbox(source, DEFAULT_DATE)
    except jinja2.TemplateSyntaxError as error:
        raise DataError(
            f"the chat template {path} is not a Jinja template: {error.message} in line {error.lineno}"
        ) from error
    except RecursionError as error:
        raise DataError(f"the chat template {path} is nested too deeply to be read; write it otherwise") from error
    return source
