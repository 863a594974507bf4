"""Parallel layout of a training stage: parallel degrees and memory choices; needs no torch."""

from dataclasses import dataclass
from typing import Annotated, Any, Literal, get_args

from pydantic import Field, PositiveInt, ValidatorFunctionWrapHandler, WrapValidator

from stages.core.contract import StrictModel
from stages.core.fields import AddedLater

EngineName = Literal["fsdp", "megatron"]
"""Name of a training engine. Type checkers need the names written out; a test compares them with the registries."""
ENGINES: tuple[EngineName, ...] = get_args(EngineName)
"""Names of all training engines; the first is the default."""


class Layout(StrictModel):
    """Parallel degrees and memory choices of a training stage; they change speed and memory, not the result.

    `dp_shard` × `cp` processes share parameters, gradients and Adam's state (FSDP2) or Adam's state alone (Megatron's
    distributed optimizer); `dp_replicate` such groups work side by side.
    """

    dp_replicate: PositiveInt = Field(
        1, description="Data-parallel replicas: number of groups of `dp_shard` processes that work side by side."
    )
    dp_shard: PositiveInt = Field(
        1,
        description="Data-parallel processes that share Adam's state; with fsdp also weights and gradients.",
    )
    tp: PositiveInt = Field(1, description="Tensor parallelism: processes that split the matrices of each layer.")
    pp: PositiveInt = Field(
        1, description="Pipeline parallelism: number of stages into which the layers are divided (megatron)."
    )
    vpp: PositiveInt = Field(
        1, description="Interleaved pipeline: number of model chunks of each pipeline stage (megatron)."
    )
    cp: PositiveInt = Field(1, description="Context parallelism: processes that share the tokens of a sequence.")
    ep: PositiveInt = Field(
        1, description="Expert parallelism: processes that share experts, within data and context parallelism."
    )
    etp: PositiveInt = Field(
        1, description="Tensor parallelism of experts: processes that split the matrices of each expert (megatron)."
    )
    sequence_parallel: bool = Field(
        False,
        description="Split norms and dropout along the sequence over the `tp` processes, to save memory.",
    )
    micro_batch_size: PositiveInt = Field(1, description="Number of packed rows in one forward pass of a process.")
    recompute: Literal["none", "selective", "full", "offload"] = Field(
        "none",
        description="Activations that the backward pass computes again. selective: with fsdp all but results of "
        "products and attention, with megatron those in attention; full: all of a layer; offload: none, they wait in "
        "host memory instead (fsdp).",
    )
    reshard_after_forward: bool = Field(
        True, description="Free a layer's gathered parameters after its forward pass, to save memory (fsdp)."
    )
    cpu_offload: bool = Field(
        False, description="Keep sharded parameters, gradients and Adam's state in host memory (fsdp)."
    )
    prefetch_layers: int = Field(
        1, ge=0, description="Number of layers whose parameters are gathered ahead of their computation (fsdp)."
    )
    compile: bool = Field(
        False, description="Compile each transformer layer, and what is done to logits, with torch.compile (fsdp)."
    )
    accumulate: Annotated[Literal["auto", "whole", "sharded"], AddedLater()] = Field(
        "auto",
        description="Treatment of gradients between micro-batches (fsdp). whole: reduced once a step; sharded: "
        "reduced after each, in less memory; auto: whole where the planner says that they fit.",
    )

    @property
    def recomputes(self) -> bool:
        """True if the backward pass computes activations again."""
        return self.recompute in ("selective", "full")

    @property
    def data_parallel_size(self) -> int:
        """Number of shares into which data parallelism splits a global batch."""
        return self.dp_replicate * self.dp_shard

    @property
    def optimizer_shards(self) -> int:
        """Processes that share Adam's state, `dp_shard` × `cp`: context-parallel ones hold the same weights."""
        return self.dp_shard * self.cp

    @property
    def world_size(self) -> int:
        """Number of processes that the layout needs; expert parallelism uses those of the other degrees."""
        return self.data_parallel_size * self.tp * self.pp * self.cp


class AutoLayout(Layout):
    """Layout that a recipe leaves to the planner (`layout: auto`). It is chosen before all other planning."""


def _auto_or_layout(value: Any, validate: ValidatorFunctionWrapHandler) -> Layout:
    if value == "auto" or isinstance(value, AutoLayout):
        return AutoLayout()
    if isinstance(value, str):
        raise ValueError(f"found {value}, expected auto, or degrees such as {{dp_shard: 2}}")
    return validate(value)


LayoutOrAuto = Annotated[Layout, WrapValidator(_auto_or_layout, json_schema_input_type=Layout | Literal["auto"])]


@dataclass(frozen=True)
class RunConstraints:
    """Sizes of a run that a parallel layout must fit, besides the model's: processes, sequence length, batch size."""

    nodes: int
    processes_per_node: int
    sequence_length: int
    """Number of tokens in a packed row."""
    global_batch_size: int
    """Number of packed rows in an optimizer step, over all processes."""

    @property
    def processes(self) -> int:
        return self.nodes * self.processes_per_node


def describe_layout(engine: EngineName, layout: Layout) -> str:
    """Return the engine and the layout fields that differ from the default: `fsdp dp_shard=2 micro_batch_size=4`."""
    chosen = layout.model_dump(exclude_defaults=True)
    return " ".join([engine, *(f"{name}={value}" for name, value in chosen.items())])
