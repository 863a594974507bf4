"""Files that only grow, and a note of how far they belong together: after a kill they are cut back to that, and it goes
on from there."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, BinaryIO, Self

from stages.core.files import write_atomically

NOTE = "kept.json"


class KeptFiles:
    """Files of a folder, open for more. `state` is what the last `keep` was given; None before the first."""

    def __init__(self, folder: Path, names: Sequence[str]) -> None:
        folder.mkdir(exist_ok=True)
        self._note = folder / NOTE
        note = json.loads(self._note.read_bytes()) if self._note.exists() else {}
        self.state: dict[str, Any] | None = note.get("state")
        self._streams = {name: (folder / name).open("ab") for name in names}
        for name, stream in self._streams.items():  # what was written after the last `keep` is not wanted
            stream.truncate(note.get("sizes", {}).get(name, 0))
            stream.seek(0, os.SEEK_END)

    def __getitem__(self, name: str) -> BinaryIO:
        return self._streams[name]

    def keep(self, state: dict[str, Any]) -> None:
        """From now on it goes on from here: all that was written is on the disk, and `state` (JSON) belongs to it."""
        for stream in self._streams.values():
            stream.flush()
            os.fsync(stream.fileno())
        sizes = {name: stream.tell() for name, stream in self._streams.items()}
        write_atomically(self._note, json.dumps({"sizes": sizes, "state": state}))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for stream in self._streams.values():
            stream.close()
