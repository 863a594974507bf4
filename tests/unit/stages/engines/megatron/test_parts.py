"""Shards of a weight under any Megatron layout contain each element of the weight exactly once."""

from dataclasses import replace
from itertools import pairwise

import pytest
import torch

from stages.engines.megatron.compat import prepare_megatron
from stages.engines.megatron.families import TensorParallelCut, WeightMapping, rules_of
from stages.models.shape import ModelShape

prepare_megatron()
from stages.engines.megatron.optimizer_shards import OptimizerShard  # noqa: E402
from stages.engines.megatron.parameter_shards import ParameterKey, ParameterShard  # noqa: E402

MODEL = ModelShape(
    num_layers=2,
    hidden_size=8,
    num_heads=8,
    num_kv_heads=4,
    head_dim=2,
    ffn_size=16,
    vocab_size=13,
    family="qwen3_moe",
    num_experts=4,
    experts_per_token=2,
    expert_ffn_size=8,
)
ROWS = {
    TensorParallelCut.WHOLE: 8,
    TensorParallelCut.VOCABULARY: 13,
    TensorParallelCut.COLUMNS: 8,
    TensorParallelCut.GATED: 2 * 16,
    TensorParallelCut.STACKED: 2 * 3,
    TensorParallelCut.QKV: 16 + 8 + 8,
    TensorParallelCut.HALVES: 2 * 8,
}
RULES = [rule for rule in rules_of("qwen3_moe") if not rule.of_experts]


def parts(rule: WeightMapping, count: int) -> list[ParameterShard]:
    """Return the shard of a parameter that each of `count` tensor-parallel ranks has."""
    rows, columns = ROWS[rule.cut], 8
    if rule.cut in (TensorParallelCut.WHOLE, TensorParallelCut.STACKED):
        return [
            ParameterShard(
                ParameterKey(1, 0, 0, 0),
                rule,
                0,
                1,
                (rows,) if rule.cut is TensorParallelCut.WHOLE else (rows, columns),
            )
        ]
    shape = (rows, columns // count) if rule.cut is TensorParallelCut.COLUMNS else (-(-rows // count), columns)
    return [ParameterShard(ParameterKey(1, 0, 0, 0), rule, index, count, shape) for index in range(count)]


def empty_weights(part: ParameterShard) -> dict[str, torch.Tensor]:
    return {name: torch.zeros(shape, dtype=torch.int64) for name, shape in part.weight_shapes(MODEL).items()}


@pytest.mark.parametrize("count", [1, 2, 4, 8])
@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.weights[0])
def test_the_pieces_of_all_parts_cover_each_weight_once(rule, count):
    weights = empty_weights(parts(rule, count)[0])
    for part in parts(rule, count):
        for piece in part.pieces(MODEL):
            weights[piece.weight][piece.of_weight()] += 1
    assert all((weight == 1).all() for weight in weights.values())


@pytest.mark.parametrize("count", [1, 2, 4])
@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.weights[0])
def test_blocks_of_ranges_hold_what_the_pieces_hold(rule, count):
    """Ranges of flattened shards, cut anywhere by Megatron's optimizer, map to the weights as whole shards do."""
    for part in parts(rule, count):
        numbers = torch.arange(1, 1 + torch.Size(part.shape).numel()).view(part.shape)
        by_pieces, by_blocks = empty_weights(part), empty_weights(part)
        for piece in part.pieces(MODEL):
            by_pieces[piece.weight][piece.of_weight()] = numbers[piece.of_parameter()]
        borders = [0, numbers.numel() // 3 + 1, numbers.numel() // 2 + 2, numbers.numel()]
        for start, stop in pairwise(borders):
            flat = numbers.flatten()[start:stop]
            for block in OptimizerShard(part, start, flat, torch.optim.AdamW([torch.zeros(1)])).blocks(MODEL):
                index = tuple(slice(first, first + size) for first, size in zip(block.offset, block.shape, strict=True))
                size = torch.Size(block.shape).numel()
                by_blocks[block.weight][index] += flat[block.start : block.start + size].view(block.shape)
        assert all(torch.equal(by_blocks[name], weight) for name, weight in by_pieces.items())


def test_queries_of_a_group_stand_before_its_key_and_value():
    """Megatron's fused QKV matrix is read as two query heads of a group, then the group's key, then its value."""
    rule = next(rule for rule in RULES if rule.cut is TensorParallelCut.QKV)
    first_half = parts(rule, 2)[0]
    rows = [(piece.weight.split(".")[-2][0], piece.weight_start, piece.length) for piece in first_half.pieces(MODEL)]
    assert rows == [("q", 0, 4), ("k", 0, 2), ("v", 0, 2), ("q", 4, 4), ("k", 2, 2), ("v", 2, 2)]


@pytest.mark.parametrize("cut", [TensorParallelCut.STACKED, TensorParallelCut.QKV])
def test_factors_of_what_does_not_learn_are_in_no_weight(cut):
    """An adapter on queries and values alone has no exported factors for the keys, as in PEFT's file."""
    rule = next(rule for rule in RULES if rule.cut is cut and ".q_proj.lora_" in rule.weights[0])
    keys = rule.weights[1].format(layer=0)
    part = replace(parts(rule, 1)[0], left_out=frozenset({keys}))
    assert keys.split(".")[-4] == "k_proj"
    assert keys not in part.weight_shapes(MODEL)
    assert {piece.weight for piece in part.pieces(MODEL)} == part.weight_shapes(MODEL).keys()
    assert len(part.weight_shapes(MODEL)) == 2


def test_factors_of_experts_are_where_peft_keeps_them():
    inward = next(rule for rule in rules_of("qwen3_moe") if rule.cut is TensorParallelCut.HALVES)
    part = ParameterShard(ParameterKey(1, 0, 3, 0), inward, 1, 2, (8, 2))
    assert part.layer_names() == []
    assert part.weight_shapes(MODEL) == {"model.layers.0.mlp.experts.base_layer.3.lora_B.default.weight": (16, 2)}
    gate, up = OptimizerShard(part, 0, torch.zeros(16), torch.optim.AdamW([torch.zeros(1)])).blocks(MODEL)
    assert gate.weight == up.weight == "model.layers.0.mlp.experts.base_layer.lora_B.default.weight"
    assert gate.weight_shape == up.weight_shape == (4, 16, 2)
    assert (gate.offset, up.offset) == ((3, 4, 0), (3, 12, 0))

    (down,) = (
        one for one in rules_of("qwen3_moe") if one.weights[0].endswith("mlp.experts.{expert}.lora_A.default.weight")
    )
    own = ParameterShard(ParameterKey(1, 0, 3, 0), down, 1, 2, (1, 4))
    (block,) = OptimizerShard(own, 0, torch.zeros(4), torch.optim.AdamW([torch.zeros(1)])).blocks(MODEL)
    assert (block.weight, block.weight_shape) == ("model.layers.0.mlp.experts.lora_A.default.weight", (4, 8))
    assert block.offset == (3, 4)


def test_experts_are_where_transformers_keeps_them():
    up_and_gate = next(
        rule for rule in rules_of("qwen3_moe") if rule.of_experts and rule.cut is TensorParallelCut.GATED
    )
    part = ParameterShard(ParameterKey(1, 0, 3, 0), up_and_gate, 1, 2, (8, 8))
    shard = OptimizerShard(part, 0, torch.zeros(64), torch.optim.AdamW([torch.zeros(1)]))
    gate, up = shard.blocks(MODEL)
    assert gate.weight == up.weight == "model.layers.0.mlp.experts.gate_up_proj"
    assert gate.weight_shape == up.weight_shape == (4, 16, 8)
    assert (gate.offset, up.offset) == ((3, 4, 0), (3, 12, 0))
