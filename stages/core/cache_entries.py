"""Entries of caches and their last use: the modification time of an entry, which `lifecycle gc` goes by.

Readers of an entry call `note_use`. The time of reading says nothing: many file systems do not keep it (`noatime`).

<cache>/<room>/<entry>    a file or a folder; where each room of a cache belongs to one kind of content
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

FOLDERS_BELOW_ROOM = {"datasets": 2, "evalscope": 0}
"""Room → levels of folders down to its entries, for rooms with another program's layout; otherwise 1.

In the room of Hugging Face's `datasets` an entry is a configuration (`json/default-<hash>`); EvalScope's entries are
one together.
"""


def note_use(entry: Path) -> None:
    """Write down that an entry is used now, unless it may not be written or is gone."""
    with suppress(OSError):
        os.utime(entry)


def note_use_of_file(room: Path, file: Path) -> None:
    """Note the use of the entry that a file belongs to; nothing for a file outside the room."""
    if file.is_relative_to(room):
        depth = FOLDERS_BELOW_ROOM.get(room.name, 1)
        note_use(room.joinpath(*file.relative_to(room).parts[:depth]))


def entries_of(room: Path) -> Iterator[Path]:
    """Yield the entries of a room, what another program keeps beside them included; the room itself if it is a file."""
    depth = FOLDERS_BELOW_ROOM.get(room.name, 1)
    level = [room]
    for _ in range(depth):
        files = [path for path in level if path.is_symlink() or not path.is_dir()]
        yield from files
        level = [inner for path in level if path not in files for inner in path.iterdir()]
    yield from level
