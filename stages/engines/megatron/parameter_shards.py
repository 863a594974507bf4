"""Slices of a Megatron model's parameters that one process holds, and their places in Hugging Face weights.

A parameter of the whole model has a `ParameterKey`; a process has a `ParameterShard` of it; a shard shares
`WeightSlice`s with Hugging Face weights.
"""

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from torch import Tensor

from stages.engines.megatron.families import EMBEDDING, HEAD, TensorParallelCut, WeightMapping, rules_of
from stages.models.shape import ModelShape

IN_LAYER = re.compile(r"decoder\.layers\.(\d+)\.(.+)")


@dataclass(frozen=True)
class WeightSlice:
    """Range of rows (dim 0) or columns (dim 1) that a Megatron parameter and a Hugging Face weight have in common."""

    weight: str
    dim: int
    weight_start: int
    parameter_start: int
    length: int

    def of_weight(self) -> tuple[slice, ...]:
        """Return the index that selects the shared rows or columns from the Hugging Face weight."""
        return self._index(self.weight_start)

    def of_parameter(self) -> tuple[slice, ...]:
        """Return the index that selects the shared rows or columns from the Megatron parameter."""
        return self._index(self.parameter_start)

    def _index(self, start: int) -> tuple[slice, ...]:
        return (*[slice(None)] * self.dim, slice(start, start + self.length))


@dataclass(frozen=True, order=True)
class ParameterKey:
    """Identity of a parameter in the whole model; sorting keys gives the order in which weights are written."""

    section: int
    """Section of the model that the parameter is in. 0: before the layers, 1: in a layer, 2: after them."""
    layer: int
    expert: int
    rule: int
    """Index, in the list of the model family, of the rule that maps the parameter to Hugging Face weights."""


@dataclass(frozen=True)
class ParameterShard:
    """Tensor-parallel slice of a Megatron parameter on one process: number `index` of `count` equal slices."""

    key: ParameterKey
    rule: WeightMapping
    index: int
    count: int
    shape: tuple[int, ...]
    is_copy: bool = False
    """True if the parameter is a copy of the tied embedding, which serves as output head on another pipeline stage."""
    left_out: frozenset[str] = frozenset()
    """LoRA factors that exist only in Megatron's fused layer, as not all of its layers are adapted."""

    def weight_names(self) -> list[str]:
        """Return the names of the Hugging Face weights that make up the Megatron parameter."""
        return [name.format(layer=self.key.layer, expert=self.key.expert) for name in self.rule.weights]

    def layer_names(self) -> list[str]:
        """Return PEFT's names of the Transformers layers that make up the Megatron parameter."""
        return [name.format(layer=self.key.layer) for name in self.rule.layers]

    def pieces(self, model: ModelShape) -> list[WeightSlice]:
        """Return the ranges of Hugging Face weights that this process holds, without padding and left-out weights."""
        return [piece for piece in self._pieces(model) if piece.weight not in self.left_out]

    def _pieces(self, model: ModelShape) -> list[WeightSlice]:
        names, (rows, *columns) = self.weight_names(), self.shape
        match self.rule.cut:
            case TensorParallelCut.WHOLE:
                return [WeightSlice(names[0], 0, 0, 0, rows)]
            case TensorParallelCut.VOCABULARY:
                start = self.index * rows
                num_real = min(rows, model.vocab_size - start)  # negative where a rank has padding alone
                return [WeightSlice(names[0], 0, start, 0, num_real)] if num_real > 0 else []
            case TensorParallelCut.COLUMNS:
                return [WeightSlice(names[0], 1, self.index * columns[0], 0, columns[0])]
            case TensorParallelCut.GATED | TensorParallelCut.STACKED:
                # [gate of this rank; up of this rank], one below the other
                length = rows // len(names)
                return [
                    WeightSlice(name, 0, self.index * length, place * length, length)
                    for place, name in enumerate(names)
                ]
            case TensorParallelCut.HALVES:
                length = rows // 2
                # count 2, index 1, length 4 -> starts [4, 12]
                starts = [(half * self.count + self.index) * length for half in (0, 1)]
                return [WeightSlice(names[0], 0, start, half * length, length) for half, start in enumerate(starts)]
            case TensorParallelCut.QKV:
                # Equally many rows a rank: where tp exceeds the number of groups, they begin within a group.
                return list(_overlaps(_query_groups(names, model), self.index * rows, rows))

    def weight_shapes(self, model: ModelShape) -> dict[str, tuple[int, ...]]:
        """Return the whole shape of each Hugging Face weight that makes up the Megatron parameter, by weight name."""
        rows, *columns = self.shape
        match self.rule.cut:
            case TensorParallelCut.WHOLE:
                sizes = [rows]
            case TensorParallelCut.VOCABULARY:
                sizes = [model.vocab_size]
            case TensorParallelCut.COLUMNS:
                sizes, columns = [rows], [columns[0] * self.count]
            case TensorParallelCut.GATED | TensorParallelCut.STACKED:
                sizes = [rows // len(self.rule.weights) * self.count] * len(self.rule.weights)
            case TensorParallelCut.HALVES:
                sizes = [rows * self.count]
            case TensorParallelCut.QKV:
                sizes = [model.query_width, model.kv_width, model.kv_width]
        shapes = {name: (size, *columns) for name, size in zip(self.weight_names(), sizes, strict=True)}
        return {name: shape for name, shape in shapes.items() if name not in self.left_out}


def local_parameter_shards(chunks: Sequence[GPTModel], model: ModelShape) -> Iterator[tuple[ParameterShard, Tensor]]:
    """Yield every parameter that this process holds, with a description of its place in the whole model.

    A copy of the embedding that serves as the head, on another pipeline stage, is a part of the embedding.
    """
    rules = rules_of(model.family)
    for chunk in chunks:
        for name, parameter in chunk.named_parameters():
            in_layer = IN_LAYER.fullmatch(name)
            # Names count layers within the chunk; `layer_number` counts over the whole model, from 1.
            layer = chunk.decoder.layers[int(in_layer[1])].layer_number - 1 if in_layer else 0
            number, expert = _find_rule(in_layer[2] if in_layer else name, rules, model)
            rule = rules[number]
            # Section 0 for the embedding, 2 for final norm and head, which are written last.
            key = ParameterKey(1 if in_layer else 2 * (rule.weights != (EMBEDDING,)), layer, expert, number)
            is_copy = rule.weights == (EMBEDDING,) and not chunk.pre_process
            left_out: frozenset[str] = getattr(parameter, "left_out", frozenset())
            place = _place_among_processes(rule)
            yield ParameterShard(key, rule, *place, tuple(parameter.shape), is_copy, left_out), parameter


def _find_rule(name: str, rules: Sequence[WeightMapping], model: ModelShape) -> tuple[int, int]:
    """Return the index of the rule for a parameter, and the parameter's expert (0 if it has none)."""
    found = ((number, match) for number, rule in enumerate(rules) if (match := re.fullmatch(rule.parameter, name)))
    number, match = next(found)
    if rules[number].weights == (HEAD,) and model.tied_embeddings:
        # Tied: the head is a copy of the embedding, and has its place in the files.
        number = next(number for number, rule in enumerate(rules) if rule.weights == (EMBEDDING,))
    if not rules[number].of_experts:
        return number, 0
    # The group that matched: the rule has one for local names and one for Transformer Engine's.
    assert match.lastindex is not None
    num_local = model.num_experts // parallel_state.get_expert_model_parallel_world_size()
    return number, parallel_state.get_expert_model_parallel_rank() * num_local + int(match[match.lastindex])


def _place_among_processes(rule: WeightMapping) -> tuple[int, int]:
    """Return the index of this process's tensor-parallel slice, and the number of slices (0 and 1 if uncut)."""
    if rule.cut in (TensorParallelCut.WHOLE, TensorParallelCut.STACKED):
        return 0, 1
    if rule.of_experts:
        return (
            parallel_state.get_expert_tensor_parallel_rank(),
            parallel_state.get_expert_tensor_parallel_world_size(),
        )
    return parallel_state.get_tensor_model_parallel_rank(), parallel_state.get_tensor_model_parallel_world_size()


def _query_groups(names: Sequence[str], model: ModelShape) -> Iterator[tuple[str, int, int]]:
    """Yield the fused QKV's row blocks in order, each group's q, k, v: weight name, first row, number of rows."""
    query, key, value = names
    head, queries = model.head_dim, model.query_width // model.num_kv_heads
    for group in range(model.num_kv_heads):
        yield query, group * queries, queries
        yield key, group * head, head
        yield value, group * head, head


def _overlaps(blocks: Iterable[tuple[str, int, int]], first_row: int, num_rows: int) -> Iterator[WeightSlice]:
    """Yield overlaps of stacked Hugging Face weights with the `num_rows` rows from `first_row` on.

    blocks: weight name, its first row and number of rows, stacked from top to bottom.
    """
    top = 0
    for weight, weight_start, length in blocks:
        # Both in rows of the stack: the overlap of the block with this process's rows; empty where begin ≥ end.
        begin, end = max(top, first_row), min(top + length, first_row + num_rows)
        if begin < end:
            yield WeightSlice(weight, 0, weight_start + begin - top, begin - first_row, end - begin)
        top += length
