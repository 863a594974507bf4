"""Slices of the tensors in a model folder's safetensors files, so that a process reads only the bytes it needs."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import Any

from safetensors import safe_open
from torch import Tensor

from stages.models.weight_files import weight_paths


class WeightFiles:
    """Tensors of a model folder's safetensors files, accessible by name, with the files mapped into memory."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._stack = ExitStack()
        self._slices: dict[str, Any] = {}

    def __enter__(self) -> WeightFiles:
        for path in weight_paths(self.folder):
            file = self._stack.enter_context(safe_open(path, framework="pt"))
            self._slices |= {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118
        return self

    def __exit__(self, *_: object) -> None:
        self._slices.clear()
        self._stack.close()

    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: tuple(tensor.get_shape()) for name, tensor in self._slices.items()}

    def read(self, name: str, *index: slice) -> Tensor:
        """Return a slice of a tensor in the weight files, read by name; without an index, the whole tensor."""
        stored = self._slices[name]
        # A scalar (a setting of Apertus' activation) has no rows of which a process could take some.
        rows: Tensor = stored[index if index and stored.get_shape() else ...]  # the bytes are read here
        return rows
