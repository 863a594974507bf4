"""Packed rows of units → the folder that `PackedDataset` reads."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from stages.core.files import write_atomically
from stages.data.dataset import ABOUT, ARRAYS, LABELS, MARGINS, Description
from stages.data.units import Unit

BUFFER_BYTES = 1 << 20


class DatasetWriter:
    """Appends rows to the arrays of `folder`; the description comes last and makes the folder complete."""

    def __init__(self, folder: Path, *, is_labelled: bool = False) -> None:
        self._folder = folder
        names = [*ARRAYS, LABELS if is_labelled else MARGINS]
        self._streams = {name: (folder / f"{name}.bin").open("wb", buffering=BUFFER_BYTES) for name in names}
        self.num_rows = 0
        self.num_documents = 0
        self.num_tokens = 0
        self.num_target_tokens = 0
        self.num_good = 0
        self.has_margins = False
        self._append("document_starts", 0)
        self._append("row_starts", 0)

    def close(self) -> None:
        """Close the files; without `finish` before it, the folder stays incomplete."""
        for stream in self._streams.values():
            stream.close()

    def write_row(self, units: Sequence[Unit]) -> None:
        """Append a row. Raises ResourceError when the disk is full."""
        for unit in units:
            for document in unit.documents:
                self._streams["tokens"].write(document.ids.tobytes())
                self._streams["loss"].write(document.loss.tobytes())
                self.num_tokens += len(document)
                self.num_target_tokens += int(document.loss.sum())
                self._append("document_starts", self.num_tokens)
            self.num_documents += len(unit.documents)
            if unit.margin is not None:
                self.has_margins = True
                self._streams[MARGINS].write(np.float32(unit.margin).tobytes())
            if unit.is_good is not None:
                self._streams[LABELS].write(np.bool_(unit.is_good).tobytes())
                self.num_good += unit.is_good
        self.num_rows += 1
        self._append("row_starts", self.num_documents)

    def finish(self, about: Description) -> None:
        """Bring everything to the disk, and the description after it."""
        for stream in self._streams.values():
            stream.flush()
            os.fsync(stream.fileno())
        write_atomically(self._folder / ABOUT, about.model_dump_json(indent=2))

    def _append(self, array: str, value: int) -> None:
        self._streams[array].write(ARRAYS[array](value).tobytes())
