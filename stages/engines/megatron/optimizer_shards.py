"""Shards of Megatron's optimizer state on this process, and their places in Hugging Face weights (for checkpoints).

Megatron's optimizers keep a shard's fp32 master weights and moments whole, or, when they are distributed, a range of
the flattened shard, which is cut into blocks: rectangles of a weight, which any layout and engine can put together.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from megatron.core.models.gpt import GPTModel
from megatron.core.optimizer import MegatronOptimizer
from torch import Tensor

from stages.engines.megatron.parameter_shards import ParameterShard, WeightSlice, local_parameter_shards
from stages.models.shape import ModelShape

EXPERT = re.compile(r"(?P<experts>.*\.mlp\.experts)\.(?P<number>\d+)\.(?P<matrix>\w+)\.weight")
EXPERT_FACTOR = re.compile(r"(?P<layer>.*\.mlp\.experts(\.base_layer)?)\.(?P<number>\d+)\.(?P<factor>lora_[AB]\..*)")
UP, DOWN = ("up_proj", "w3"), ("down_proj", "w2")


@dataclass(frozen=True)
class WeightBlock:
    """Block (rectangle) of a Transformers weight whose elements are consecutive in a flattened Megatron parameter."""

    weight: str
    weight_shape: tuple[int, ...]
    offset: tuple[int, ...]
    shape: tuple[int, ...]
    start: int

    @property
    def is_first(self) -> bool:
        """True if the block contains the first element of the Transformers weight."""
        return not any(self.offset)


@dataclass(frozen=True)
class OptimizerShard:
    """Range of a Megatron parameter's elements on this process, with their fp32 master weights and Adam moments."""

    part: ParameterShard
    start: int
    """Index of the optimizer shard's first element in this process's flattened slice of the parameter."""
    master: Tensor
    """Fp32 master weights of the shard, in any shape with as many elements as the shard."""
    optimizer: torch.optim.Optimizer

    @property
    def step(self) -> Tensor:
        """Number of optimizer steps that have updated the shard, float32 []."""
        state = self.optimizer.state[self.master]
        kept = state["step"] if "step" in state else self._group["step"]
        return torch.as_tensor(kept, dtype=torch.float32, device="cpu").clone()

    def count_steps(self, value: Tensor) -> None:
        state = self.optimizer.state[self.master]
        if "step" in state:  # torch's; Transformer Engine's counts for a whole group
            state["step"].copy_(value)
        else:
            self._group["step"] = int(value)

    @property
    def _group(self) -> dict[str, Any]:
        return next(group for group in self.optimizer.param_groups if any(p is self.master for p in group["params"]))

    @property
    def moments(self) -> dict[str, Tensor]:
        """Adam's moments `exp_avg` and `exp_avg_sq` of the optimizer shard, fp32, as large as its master weights."""
        return {name: self.optimizer.state[self.master][name] for name in ("exp_avg", "exp_avg_sq")}

    def blocks(self, model: ModelShape) -> Iterator[WeightBlock]:
        """Yield the blocks of Transformers weights that the shard covers, without padding; `start` counts within it."""
        # [start, stop): elements of the flattened parameter on this process
        stop = self.start + self.master.numel()
        shapes = self.part.weight_shapes(model)
        for piece in self.part.pieces(model):
            for block in _blocks(piece, self.part.shape, shapes[piece.weight], (self.start, stop)):
                yield _as_in_transformers(block, model)


def local_optimizer_shards(
    chunks: Sequence[GPTModel], model: ModelShape, optimizer: MegatronOptimizer
) -> list[OptimizerShard]:
    """Return all shards of optimizer state that this process updates; Adam's moments must exist already."""
    parts = {parameter: part for part, parameter in local_parameter_shards(chunks, model)}
    shards: list[OptimizerShard] = []
    for each in real_optimizers(optimizer):
        shards += [
            OptimizerShard(parts[parameter], _start(each, parameter), master, each.optimizer)
            for parameter, master in _masters(each)
        ]
    return shards


def real_optimizers(optimizer: MegatronOptimizer) -> list[Any]:
    """Return the optimizers in Megatron's chain that have parameters on this process."""
    return [each for each in optimizer.chained_optimizers if not getattr(each, "is_stub_optimizer", False)]


def make_moments(optimizer: MegatronOptimizer) -> None:
    """Create the moments of optimizers that have made no step yet, so that a checkpoint can fill them."""
    for each in real_optimizers(optimizer):
        if not each.optimizer.state:
            _step_nowhere(each.optimizer)


def _masters(optimizer: Any) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield each parameter with its fp32 master weight, which is the parameter itself in unsharded fp32 training."""
    if hasattr(optimizer, "shard_fp32_groups"):  # DistributedOptimizer
        pairs = [
            (optimizer.model_float16_groups, optimizer.shard_fp32_from_float16_groups),
            (optimizer.model_fp32_groups, optimizer.shard_fp32_groups),
        ]
    elif hasattr(optimizer, "float16_groups"):  # Float16OptimizerWithFloat16Params
        pairs = [
            (optimizer.float16_groups, optimizer.fp32_from_float16_groups),
            (optimizer.fp32_from_fp32_groups, optimizer.fp32_from_fp32_groups),
        ]
    else:
        groups = [group["params"] for group in optimizer.optimizer.param_groups]
        pairs = [(groups, groups)]
    for parameter_groups, master_groups in pairs:
        for parameters, masters in zip(parameter_groups, master_groups, strict=True):
            yield from zip(parameters, masters, strict=True)


def _start(optimizer: Any, parameter: Tensor) -> int:
    if not hasattr(optimizer, "shard_fp32_groups"):  # not distributed: masters are whole
        return 0
    return int(optimizer._get_model_param_range_map(parameter)["param"].start)


def _step_nowhere(optimizer: torch.optim.Optimizer) -> None:
    rates = [group["lr"] for group in optimizer.param_groups]
    for group in optimizer.param_groups:
        # A step of rate 0 with zero gradients: it creates the moments, all 0, and leaves the weights.
        group["lr"] = 0.0
        for parameter in group["params"]:
            parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    optimizer.zero_grad()
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = rate


def _blocks(
    piece: WeightSlice, part_shape: tuple[int, ...], weight_shape: tuple[int, ...], range_: tuple[int, int]
) -> Iterator[WeightBlock]:
    """Yield the blocks (rectangles) of a Hugging Face weight in a range of a flattened Megatron parameter.

    piece: the shared rows or columns. Blocks are at most the end of a row, whole rows, and the beginning of a row.
    """
    columns = part_shape[1] if len(part_shape) > 1 else 1
    rows = (piece.parameter_start, piece.parameter_start + piece.length) if piece.dim == 0 else (0, part_shape[0])
    begin, end = max(range_[0], rows[0] * columns), min(range_[1], rows[1] * columns)
    while begin < end:
        row, column = divmod(begin, columns)
        # Whole rows from the start of one; else the rest of this row.
        num_rows = max(1, (end - begin) // columns) if column == 0 else 1
        num_columns = min(columns - column, end - begin)
        offset = _offset(piece, row, column)
        dims = len(part_shape)
        yield WeightBlock(piece.weight, weight_shape, offset[:dims], (num_rows, num_columns)[:dims], begin - range_[0])
        begin += num_rows * num_columns


def _offset(piece: WeightSlice, row: int, column: int) -> tuple[int, int]:
    """Convert row and column of an element in a Megatron parameter to its row and column in the Hugging Face weight."""
    shift = piece.weight_start - piece.parameter_start
    return (row + shift, column) if piece.dim == 0 else (row, column + shift)


def _as_in_transformers(block: WeightBlock, model: ModelShape) -> WeightBlock:
    """Convert a block (rectangle) of a weight as stored in files to its block of the weight that Transformers loads.

    A layer's experts are two there, in `mlp`: gate and up [experts, gate and up rows, columns], and down.
    """
    weight = block.weight.replace(".block_sparse_moe.", ".mlp.")
    if of_expert := EXPERT_FACTOR.fullmatch(weight):
        return _of_all_experts(block, f"{of_expert['layer']}.{of_expert['factor']}", int(of_expert["number"]), model)
    of_matrix = EXPERT.fullmatch(weight)
    if of_matrix is None:
        return replace(block, weight=weight)
    rows, columns = block.weight_shape
    if of_matrix["matrix"] in DOWN:
        name, shape, first_row = "down_proj", (model.num_experts, rows, columns), 0
    else:
        # Transformers stacks an expert's gate and up: up comes below the rows of gate.
        first_row = rows if of_matrix["matrix"] in UP else 0
        name, shape = "gate_up_proj", (model.num_experts, 2 * rows, columns)
    offset = (int(of_matrix["number"]), first_row + block.offset[0], block.offset[1])
    return WeightBlock(f"{of_matrix['experts']}.{name}", shape, offset, (1, *block.shape), block.start)


def _of_all_experts(block: WeightBlock, weight: str, expert: int, model: ModelShape) -> WeightBlock:
    """Convert a block of one expert's LoRA factor to its block in the factor that holds all experts.

    A is [experts × rank, in], as PEFT has it; B [experts, out, rank], as the FSDP engine keeps it.
    """
    rows, columns = block.weight_shape
    row, column = block.offset
    if ".lora_A." in weight:
        shape = (model.num_experts * rows, columns)
        return replace(block, weight=weight, weight_shape=shape, offset=(expert * rows + row, column))
    return WeightBlock(
        weight, (model.num_experts, rows, columns), (expert, row, column), (1, *block.shape), block.start
    )
