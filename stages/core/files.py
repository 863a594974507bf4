"""Reading and writing of small files: atomic writes, JSON with clear errors, and JSON Lines that are appended to."""

import json
import os
from contextlib import suppress
from pathlib import Path
from typing import Any

from stages.core.errors import ModelError


def write_atomically(path: Path, content: str | bytes) -> None:
    """Write a file (text as UTF-8) so that a reader, or a crash, sees either the old content or the whole new one."""
    # In the same folder, since a rename is atomic within one file system only.
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with temporary.open("wb") as stream:
            stream.write(content.encode() if isinstance(content, str) else content)
            stream.flush()
            # Before the rename: else a crash of the machine could leave the new name without its content.
            os.fsync(stream.fileno())
        temporary.replace(path)
    except BaseException:
        with suppress(OSError):
            temporary.unlink()
        raise


def read_json_lines(path: Path) -> list[Any]:
    """Return the values of all lines of a JSON Lines file. Raises OSError or ValueError for unreadable content."""
    # Lines of text would also end at U+2028 and U+0085, which JSON writes as they are.
    return [json.loads(line) for line in path.read_bytes().splitlines()]


def read_end(path: Path, num_bytes: int, begin: int = 0) -> str:
    """Return the last `num_bytes` bytes of a file as text, none before byte `begin`; empty if it is unreadable."""
    try:
        with path.open("rb") as stream:
            stream.seek(max(begin, stream.seek(0, os.SEEK_END) - num_bytes))
            return stream.read().decode(errors="replace")
    except OSError:
        return ""


def remove_cut_off_line(path: Path) -> None:
    """Remove an unfinished last line from a JSON Lines file, left by a killed process, before lines are appended."""
    if path.is_file():
        content = path.read_bytes()
        with path.open("r+b") as stream:
            stream.truncate(content.rfind(b"\n") + 1)  # 0 without a line end


def read_json_object(path: Path) -> dict[str, Any]:
    """Return the JSON object in a file. Raises ModelError if the file is unreadable or holds no object."""
    try:
        text = path.read_bytes().decode("utf-8")
    except (OSError, ValueError) as error:
        raise ModelError(f"{path} cannot be read as JSON in UTF-8: {error}; fetch or save this file again") from error
    return parse_json_object(text, str(path))


def parse_json_object(text: str, where: str) -> dict[str, Any]:
    """Return the JSON object in a text. Raises ModelError if there is none; `where` names the text in the error."""
    try:
        content = json.loads(text)
    except ValueError as error:
        raise ModelError(f"{where} cannot be read as JSON: {error}; fetch or save this file again") from error
    except RecursionError as error:
        raise ModelError(f"{where} is nested too deeply to be read; fetch or save this file again") from error
    if not isinstance(content, dict):
        raise ModelError(f"{where} holds a JSON {type(content).__name__}, not an object; fetch or save this file again")
    return content
