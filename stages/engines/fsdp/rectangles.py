"""Checkpoints of shards whose rows or columns are not consecutive: each is written and read as several rectangles.

A plan splits a fused matrix, such as gate and up projections in one, so that each process has a part of both. To
`torch.distributed.checkpoint` a shard is one rectangle; another layout would read other numbers in its place.
"""

from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadPlan, SavePlan, WriteItem
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard

Run = tuple[int, int, int]
"""Start in the whole tensor, start in the shard, and length, of consecutive indices along a dimension."""


class RectanglesWriter(DefaultSavePlanner):
    """Planner of a checkpoint that writes each rectangle of a shard where it is in the whole tensor."""

    def create_local_plan(self) -> SavePlan:
        """Return what this process writes."""
        plan = super().create_local_plan()
        self.plan = replace(plan, items=[part for item in plan.items for part in self._parts(item)])
        return self.plan

    def lookup_object(self, index: MetadataIndex) -> Any:
        """Return the tensor to write at a place."""
        kept = self.state_dict[index.fqn]
        return _rectangle(kept, index) if is_interleaved(kept) else super().lookup_object(index)

    def _parts(self, item: WriteItem) -> Iterator[WriteItem]:
        kept = self.state_dict[item.index.fqn]
        if not is_interleaved(kept) or item.tensor_data is None:
            yield item
            return
        for chunk in _chunks(kept):
            yield replace(
                item,
                index=MetadataIndex(item.index.fqn, chunk.offsets),
                tensor_data=replace(item.tensor_data, chunk=chunk),
            )


class RectanglesReader(DefaultLoadPlanner):
    """Planner that reads the rectangles of each shard from a checkpoint of any layout."""

    def create_local_plan(self) -> LoadPlan:
        """Return what this process reads."""
        plan = super().create_local_plan()
        parts = {name: _chunks(kept) for name, kept in self.state_dict.items() if is_interleaved(kept)}
        items = [item for item in plan.items if item.dest_index.fqn not in parts]
        assert self.metadata
        for name, chunks in parts.items():
            stored = self.metadata.state_dict_metadata[name]
            assert isinstance(stored, TensorStorageMetadata)
            items += create_read_items_for_chunk_list(name, stored, chunks)
        return replace(plan, items=items)

    def lookup_tensor(self, index: MetadataIndex) -> Tensor:
        """Return the tensor to read into, at a place."""
        kept = self.state_dict[index.fqn]
        return _rectangle(kept, index) if is_interleaved(kept) else super().lookup_tensor(index)


def is_interleaved(tensor: Any) -> bool:
    """Return whether a plan of tensor parallelism gives processes parts of a tensor in turns."""
    if not isinstance(tensor, DTensor):
        return False
    named = dict(zip(tensor.device_mesh.mesh_dim_names or (), tensor.placements, strict=True))
    return isinstance(named.get("tp"), _StridedShard)


def _chunks(tensor: DTensor) -> list[ChunkStorageMetadata]:
    return [
        ChunkStorageMetadata(torch.Size([run[0] for run in one]), torch.Size([run[2] for run in one]))
        for one in product(*_runs(tensor))
    ]


def _rectangle(tensor: DTensor, index: MetadataIndex) -> Tensor:
    """Return the view of a shard that has the rectangle at a place of the whole tensor."""
    found = next(one for one in product(*_runs(tensor)) if torch.Size([run[0] for run in one]) == index.offset)
    return tensor.to_local().detach()[tuple(slice(begin, begin + length) for _, begin, length in found)]


def _runs(tensor: DTensor) -> list[list[Run]]:
    """Return, for each dimension, the consecutive indices of which this process's shard is made, in its order."""
    return [_consecutive(own_indices(tensor, dimension).tolist()) for dimension in range(tensor.ndim)]


def own_indices(tensor: DTensor, dimension: int) -> Tensor:
    """Return the indices along a dimension of the whole tensor that this process's shard has."""
    placements = [_along(one, dimension) for one in tensor.placements]
    mesh = tensor.device_mesh
    whole = torch.arange(tensor.shape[dimension], device=mesh.device_type)
    return distribute_tensor(whole, mesh, placements, src_data_rank=None).to_local()


def _along(placement: Placement, dimension: int) -> Placement:
    if not isinstance(placement, (Shard, _StridedShard)) or placement.dim != dimension:
        return Replicate()
    return _StridedShard(0, split_factor=placement.split_factor) if isinstance(placement, _StridedShard) else Shard(0)


def _consecutive(indices: list[int]) -> list[Run]:
    runs: list[Run] = []
    for place, index in enumerate(indices):
        start, begin, length = runs[-1] if runs else (-1, 0, 0)
        if runs and start + length == index:
            runs[-1] = start, begin, length + 1
        else:
            runs.append((index, place, 1))
    return runs
