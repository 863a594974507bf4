"""Parallel layout: degrees and memory choices of a training stage. Pure; needs no torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, Literal, get_args

from pydantic import Field, PositiveInt, ValidatorFunctionWrapHandler, WrapValidator

from stages.core.contract import StrictModel
from stages.core.fields import AddedLater

EngineName = Literal["fsdp", "megatron"]
"""Name of a training engine. Type checkers take no computed Literal: a test holds it equal to the registries' names."""
ENGINES: tuple[EngineName, ...] = get_args(EngineName)
"""Names of all training engines; the first is the default."""


class Layout(StrictModel):
    """Parallel degrees and memory choices of a training; they change speed and memory, not the result.

    Data parallelism has the same two degrees under both engines: `dp_shard` processes share parameters, gradients and
    Adam's state (FSDP2) or Adam's state alone (Megatron's distributed optimizer, over `cp` processes as well);
    `dp_replicate` such groups work side by side.
    """

    dp_replicate: PositiveInt = Field(1, description="Data-parallel replicas of a group of `dp_shard` processes.")
    dp_shard: PositiveInt = Field(
        1, description="Processes over which Adam's state is sharded, with fsdp also weights and gradients."
    )
    tp: PositiveInt = Field(1, description="Tensor parallelism (megatron).")
    pp: PositiveInt = Field(1, description="Pipeline stages (megatron).")
    vpp: PositiveInt = Field(1, description="Interleaved model chunks of each pipeline stage (megatron).")
    cp: PositiveInt = Field(1, description="Context parallelism: processes that share a sequence (megatron).")
    ep: PositiveInt = Field(1, description="Expert parallelism, within data and context parallelism (megatron).")
    etp: PositiveInt = Field(1, description="Tensor parallelism of each expert (megatron).")
    sequence_parallel: bool = Field(False, description="Split norms and dropout along the sequence over tp (megatron).")
    micro_batch_size: PositiveInt = Field(1, description="Packed rows in one forward pass of one process.")
    recompute: Literal["none", "selective", "full"] = Field(
        "none", description="Activations that the backward pass computes again instead of keeping them."
    )
    reshard_after_forward: bool = Field(True, description="Free gathered parameters after the forward pass (fsdp).")
    cpu_offload: bool = Field(False, description="Keep sharded parameters, gradients and Adam in host memory (fsdp).")
    prefetch_layers: int = Field(1, ge=0, description="Layers whose parameters are gathered ahead (fsdp).")
    compile: bool = Field(False, description="torch.compile each transformer layer (fsdp).")
    accumulate: Annotated[Literal["auto", "whole", "sharded"], AddedLater()] = Field(
        "auto",
        description="Gradients between micro-batches (fsdp). whole: reduced once a step, held unsharded until then; "
        "sharded: reduced after every micro-batch; auto: whole where the planner says that they fit.",
    )

    @property
    def data_parallel_size(self) -> int:
        """Number of shares of a global batch."""
        return self.dp_replicate * self.dp_shard

    @property
    def optimizer_shards(self) -> int:
        """Processes that share Adam's state; those of context parallelism hold the same weights, too."""
        return self.dp_shard * self.cp

    @property
    def world_size(self) -> int:
        """Processes that the layout needs; expert parallelism is folded into the others."""
        return self.data_parallel_size * self.tp * self.pp * self.cp


class AutoLayout(Layout):
    """`layout: auto` of a recipe; the planner replaces it by its choice before anything else is planned."""


def _auto_or_layout(value: Any, validate: ValidatorFunctionWrapHandler) -> Layout:
    if value == "auto" or isinstance(value, AutoLayout):
        return AutoLayout()
    if isinstance(value, str):
        raise ValueError(f"found {value}, expected auto, or degrees such as {{dp_shard: 2}}")
    return validate(value)


LayoutOrAuto = Annotated[Layout, WrapValidator(_auto_or_layout, json_schema_input_type=Layout | Literal["auto"])]


@dataclass(frozen=True)
class RunConstraints:
    """Numbers besides the model's that a layout must fit."""

    nodes: int
    processes_per_node: int
    sequence_length: int
    """Tokens of a packed row."""
    global_batch_size: int
    """Packed rows of an optimizer step, over all processes."""

    @property
    def processes(self) -> int:
        """Number of processes on all nodes."""
        return self.nodes * self.processes_per_node


def describe_layout(engine: EngineName, layout: Layout) -> str:
    """Return the engine and what differs from the default layout: `fsdp dp_shard=2 micro_batch_size=4`."""
    chosen = layout.model_dump(exclude_defaults=True)
    return " ".join([engine, *(f"{name}={value}" for name, value in chosen.items())])
