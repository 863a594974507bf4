"""Files of JSON and text: written atomically, read with errors of one sentence, and files of lines, which grow."""

from __future__ import annotations

import json
import os
from contextlib import suppress
from pathlib import Path
from typing import Any

from stages.core.errors import ModelError


def write_atomically(path: Path, content: str | bytes) -> None:
    """Write bytes, or a text as UTF-8, so that a reader, or a crash, sees either the old file or the whole new one."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with temporary.open("wb") as stream:
            stream.write(content.encode() if isinstance(content, str) else content)
            stream.flush()
            os.fsync(stream.fileno())
        temporary.replace(path)
    except BaseException:
        with suppress(OSError):
            temporary.unlink()
        raise


def read_json_lines(path: Path) -> list[Any]:
    """Return the value of each line of a file in UTF-8. Raises OSError or ValueError for unreadable content."""
    # Lines of text would also end at U+2028 and U+0085, which JSON writes as they are.
    return [json.loads(line) for line in path.read_bytes().splitlines()]


def read_end(path: Path, num_bytes: int, begin: int = 0) -> str:
    """Return the text of a file's last bytes, but none before `begin`; empty for a file that cannot be read."""
    try:
        with path.open("rb") as stream:
            stream.seek(max(begin, stream.seek(0, os.SEEK_END) - num_bytes))
            return stream.read().decode(errors="replace")
    except OSError:
        return ""


def remove_cut_off_line(path: Path) -> None:
    """Remove an unfinished last line from a file of lines: a killed process left it; it would spoil the next one."""
    if path.is_file():
        content = path.read_bytes()
        with path.open("r+b") as stream:
            stream.truncate(content.rfind(b"\n") + 1)


def read_json_object(path: Path) -> dict[str, Any]:
    """Return the JSON object in a file. Raises ModelError if it is unreadable, not UTF-8, or no object."""
    try:
        text = path.read_bytes().decode("utf-8")
    except (OSError, ValueError) as error:
        raise ModelError(f"{path} cannot be read as JSON in UTF-8: {error}; fetch or save this file again") from error
    return parse_json_object(text, str(path))


def parse_json_object(text: str, where: str) -> dict[str, Any]:
    """Return the JSON object in a text; `where` names the text in errors. Raises ModelError when it is none."""
    try:
        content = json.loads(text)
    except ValueError as error:
        raise ModelError(f"{where} cannot be read as JSON: {error}; fetch or save this file again") from error
    except RecursionError as error:
        raise ModelError(f"{where} is nested too deeply to be read; fetch or save this file again") from error
    if not isinstance(content, dict):
        raise ModelError(f"{where} holds a JSON {type(content).__name__}, not an object; fetch or save this file again")
    return content
