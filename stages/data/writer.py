"""Packed rows of units → the folder that `PackedDataset` reads."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from stages.core.files import write_atomically
from stages.data.dataset import ABOUT, ARRAYS, LABELS, MARGINS, Description
from stages.data.unit_arrays import Units
from stages.data.units import Unit

BUFFER_BYTES = 1 << 20


class DatasetWriter:
    """Appends rows to the arrays of `folder`; the description comes last and makes the folder complete."""

    def __init__(self, folder: Path, *, is_labelled: bool = False) -> None:
        self._folder = folder
        self._is_labelled = is_labelled
        names = [*ARRAYS, LABELS if is_labelled else MARGINS]
        self._streams = {name: (folder / f"{name}.bin").open("wb", buffering=BUFFER_BYTES) for name in names}
        self.num_rows = 0
        self.num_documents = 0
        self.num_tokens = 0
        self.num_target_tokens = 0
        self.num_good = 0
        self.has_margins = False
        self._append("document_starts", np.zeros(1))
        self._append("row_starts", np.zeros(1))

    def close(self) -> None:
        """Close the files; without `finish` before it, the folder stays incomplete."""
        for stream in self._streams.values():
            stream.close()

    def write_row(self, units: Sequence[Unit]) -> None:
        """Append a row. Raises ResourceError when the disk is full."""
        has_margins = any(unit.margin is not None for unit in units)
        self.write_rows(Units.of(units, is_labelled=self._is_labelled, has_margins=has_margins), [len(units)])

    def write_rows(self, units: Units, units_of_rows: Sequence[int]) -> None:
        """Append rows: `units` in their order, so many in each. Raises ResourceError when the disk is full."""
        rows = np.concatenate([[0], np.cumsum(units_of_rows)]).astype(np.int64)
        documents_before = np.concatenate([[0], np.cumsum(units.num_documents)])
        self._append("row_starts", self.num_documents + documents_before[rows[1:]])
        self._append("document_starts", self.num_tokens + np.cumsum(units.document_lengths))
        self._append("tokens", units.tokens)
        self._append("loss", units.loss)
        self.num_rows += len(units_of_rows)
        self.num_documents += len(units.document_lengths)
        self.num_tokens += len(units.tokens)
        self.num_target_tokens += int(units.loss.sum())
        if units.margins is not None and len(units):
            self.has_margins = True
            self._streams[MARGINS].write(units.margins.tobytes())
        if units.labels is not None:
            self._streams[LABELS].write(units.labels.tobytes())
            self.num_good += int(units.labels.sum())

    def finish(self, about: Description) -> None:
        """Bring everything to the disk, and the description after it."""
        for stream in self._streams.values():
            stream.flush()
            os.fsync(stream.fileno())
        write_atomically(self._folder / ABOUT, about.model_dump_json(indent=2))

    def _append(self, array: str, values: NDArray[np.generic]) -> None:
        self._streams[array].write(values.astype(ARRAYS[array], copy=False).tobytes())
