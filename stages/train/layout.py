"""Parallel layout: degrees and memory choices of a training stage. Pure; needs no torch."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, PositiveInt

from stages.contract import StrictModel


class Layout(StrictModel):
    """How a model and its batch are spread over processes. Changes speed and memory, not what is learned."""

    dp_replicate: PositiveInt = Field(1, description="Replicas of the sharded model (hybrid sharding).")
    dp_shard: PositiveInt = Field(1, description="Processes over which parameters, gradients and Adam are sharded.")
    micro_batch_size: PositiveInt = Field(1, description="Packed rows in one forward pass of one process.")
    recompute: Literal["none", "selective", "full"] = Field("none", description="Activations computed again.")
    reshard_after_forward: bool = Field(True, description="Free gathered parameters between forward and backward.")
    cpu_offload: bool = Field(False, description="Keep sharded parameters, gradients and Adam in host memory.")
    prefetch_layers: int = Field(1, ge=0, description="Layers whose parameters are gathered ahead.")
    compile: bool = Field(False, description="torch.compile each transformer layer.")

    @property
    def data_parallel_size(self) -> int:
        """Processes that see different data."""
        return self.dp_replicate * self.dp_shard

    @property
    def world_size(self) -> int:
        """Processes that the layout needs."""
        return self.dp_replicate * self.dp_shard
