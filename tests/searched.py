"""Search for secrets in files and command lines while programs run, whose files and processes may go at any moment."""

import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path


def status_of_all(folder: Path) -> Iterator[tuple[Path, os.stat_result]]:
    """Yield a folder and all that is in it, with its status (that of links, not of what they lead to)."""
    yield folder, folder.lstat()
    for place, folders, files in os.walk(folder):
        for path in (Path(place, name) for name in (*folders, *files)):
            with suppress(FileNotFoundError):  # a database's journal, say, which lives for milliseconds
                yield path, path.lstat()


def files_with(folder: Path, text: str) -> list[Path]:
    """Return the files below a folder that contain a text."""
    found = []
    for path, _ in status_of_all(folder):
        with suppress(FileNotFoundError):
            if path.is_file() and text.encode() in path.read_bytes():
                found.append(path)
    return found


def commands_with(text: str) -> list[str]:
    """Return the command lines of this machine's processes that contain a text."""
    commands = []
    for file in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):  # it has ended, or is another user's
            command = file.read_bytes()
            if text.encode() in command:
                commands.append(command.decode(errors="replace"))
    return commands
