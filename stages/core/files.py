"""Files that are written atomically, and files of JSON lines, which grow."""

from __future__ import annotations

import json
import os
from contextlib import suppress
from pathlib import Path
from typing import Any


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


def remove_cut_off_line(path: Path) -> None:
    """Remove an unfinished last line, which a killed process left and which would spoil the next one."""
    if path.is_file():
        content = path.read_bytes()
        with path.open("r+b") as stream:
            stream.truncate(content.rfind(b"\n") + 1)
