"""Rows of a Transformers model's weights, read from the files of its Hugging Face folder on demand.

Transformers knows which tensors become which weight: renamed, experts stacked, joined, cut. Where rows of a weight are
rows of one tensor, or whole tensors, only those are read; of other conversions the whole weight.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    Concatenate,
    MergeModulelist,
    Transpose,
    WeightConverter,
    WeightRenaming,
    dot_natural_key,
    rename_source_key,
)

from stages.engines.weight_slices import WeightFiles

RowsOf = Callable[[str], slice | None]
"""Function that takes a weight's name and returns the rows to read of that weight; None means no rows."""


@dataclass
class WeightSource:
    """Tensors in weight files that make up one or several model weights, with Transformers' converter, if any."""

    converter: WeightConverter | None
    tensors: list[tuple[str, str]] = field(default_factory=list)
    """Names of tensors in the files, each with the pattern of Transformers' converter that it matches."""

    @property
    def stacks_rows(self) -> bool:
        """True if each row of the weight is made of whole tensors, as in stacked experts, and can be read alone."""
        first, *others = self.converter.operations if self.converter else [None]
        return isinstance(first, MergeModulelist) and first.dim == 0 and all(map(_leaves_rows_alone, others))


class ModelFiles:
    """Weight files of a model, converted on reading to the weights that Transformers would load from them."""

    def __init__(self, folder: Path, bare: Any, stored: Mapping[str, str] | None = None) -> None:
        """Read names and shapes of the weights in the files. bare: Transformers' model on the meta device.

        stored: names in the files by those to read them under; default: all weights, by their own names.
        """
        self.folder = folder
        self._bare = bare
        with WeightFiles(folder) as files:
            shapes = files.shapes()
        self._stored = {name: name for name in shapes} if stored is None else stored
        self._shapes = {name: shapes[original] for name, original in self._stored.items()}
        self._sources = self._find_sources()
        expected = self._weights = bare.state_dict(keep_vars=True)
        made = {name for target, source in self._sources.items() for name in _targets(target, source)}
        names: dict[int, list[str]] = {}
        for name, weight in expected.items():
            names.setdefault(id(weight), []).append(name)  # tied weights are one tensor with several names
        self.missing = sorted(same[0] for same in names.values() if not made.intersection(same))
        """Names of model weights that the files lack. Weights tied to each other count once."""
        self.mismatched = sorted(
            target
            for target, source in self._sources.items()
            if source.converter is None and self._shapes[source.tensors[0][0]] != tuple(expected[target].shape)
        )
        """Names of model weights whose shape in the files differs from the model's."""
        # Only where the files hold several of the tied names can their values differ.
        self._tied = [same for same in names.values() if len(made.intersection(same)) > 1]

    def renamed(self, stored: Mapping[str, str]) -> ModelFiles:
        """Return the same files with some weights alone, read under other names. stored: their names by these."""
        return ModelFiles(self.folder, self._bare, stored)

    def has_untied(self) -> bool:
        """Return whether weights that the model ties have different values in the files. Reads them from the files."""
        with WeightFiles(self.folder) as files:
            stored = [
                [files.read(self._stored[self._sources[name].tensors[0][0]]) for name in same if name in self._sources]
                for same in self._tied
            ]
            return any(not torch.equal(first, other) for first, *others in stored for other in others)

    def read(self, rows_of: RowsOf) -> Iterator[tuple[str, Tensor]]:
        """Yield the rows of each weight that this process needs, by name, on the CPU in the files' dtype."""
        with WeightFiles(self.folder) as files:
            for target, source in self._sources.items():
                wanted = {name: rows for name in _targets(target, source) if (rows := rows_of(name)) is not None}
                # A list, since entries are deleted on the way.
                for name in [name for name, rows in wanted.items() if rows.start == rows.stop is not None]:
                    del wanted[name]  # of a weight with fewer rows than there are processes
                    yield name, torch.empty(0, *self._weights[name].shape[1:])
                if not wanted:
                    continue
                if source.converter is None:
                    yield target, files.read(self._stored[source.tensors[0][0]], wanted[target])
                else:
                    yield from self._converted(files, target, source, wanted)

    def _converted(
        self, files: WeightFiles, target: str, source: WeightSource, wanted: dict[str, slice]
    ) -> Iterator[tuple[str, Tensor]]:
        """Yield the weights that a converter makes of several tensors, of stacked experts only the wanted ones."""
        assert source.converter
        # Row i of a stack is the i-th tensor of each pattern: of other experts not a byte is read.
        chosen = wanted[target] if source.stacks_rows else slice(None)
        converter = deepcopy(source.converter)  # it collects tensors, and is used again for other layers
        for pattern in dict.fromkeys(pattern for _, pattern in source.tensors):
            for name in [name for name, of in source.tensors if of == pattern][chosen]:
                converter.add_tensor(target, name, pattern, files.read(self._stored[name]))
        made: dict[str, Any] = converter.convert(target, model=self._bare, config=self._bare.config)
        for name, value in made.items():
            whole = value[0] if isinstance(value, list) else value
            if name in wanted:
                yield name, whole if source.stacks_rows else whole[wanted[name]]

    def _find_sources(self) -> dict[str, WeightSource]:
        """Return the tensors of each model weight; weights made together are under the first one's name."""
        mapping = get_model_conversion_mapping(self._bare)
        renamings = [conversion for conversion in mapping if isinstance(conversion, WeightRenaming)]
        converters = [conversion for conversion in mapping if isinstance(conversion, WeightConverter)]
        by_pattern = {pattern: conversion for conversion in converters for pattern in conversion.source_patterns}
        expected, prefix = self._bare.state_dict(), self._bare.base_model_prefix
        sources: dict[str, WeightSource] = {}
        # Natural order (2 before 10): experts are stacked in the order in which their tensors are added.
        for name in sorted(self._shapes, key=dot_natural_key):
            target, pattern = rename_source_key(name, renamings, converters, prefix, expected)
            # A renaming may hit a name that is right as it is.
            if target not in expected and name in expected:
                target, pattern = rename_source_key(name, [], [], prefix, expected)
            if target in expected:
                source = sources.setdefault(target, WeightSource(by_pattern[pattern] if pattern else None))
                source.tensors.append((name, pattern or ""))
        self.conversions = [conversion for conversion in mapping if conversion.was_used()]
        """Weight conversions that Transformers applies to these files, and reverts when the model is written."""
        return sources


def _targets(target: str, source: WeightSource) -> list[str]:
    if source.converter is None:
        return [target]
    first, *others = source.converter.target_patterns
    return [target, *(target.replace(first, other) for other in others)]


def _leaves_rows_alone(operation: Any) -> bool:
    """Return whether a conversion of weights treats each row (dimension 0) alone, so rows can be read one by one."""
    if isinstance(operation, Concatenate):
        return bool(operation.dim != 0)
    return isinstance(operation, Transpose) and not operation.check_dims and 0 not in (operation.dim0, operation.dim1)
