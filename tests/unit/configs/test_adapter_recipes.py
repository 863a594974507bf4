"""Recipes that train adapters fit, and their predicted memory equals the hand computation in their comments."""

from __future__ import annotations

import pytest

from stages.models.facts import ModelFacts
from stages.planner.memory import GIB, StageMemory, memory
from tests.unit.configs.test_megatron_recipes import LLAMA_70B, QWEN3_8B, QWEN3_30B, training_stages


def predicted(name: str, config: dict) -> StageMemory:
    (stage,) = training_stages(name)
    return memory(ModelFacts(config).shape, stage.engine, stage.layout, stage.workload).worst


def test_llama_70b_under_tp8():
    """LoRA rank 16 on seven matrices of 80 layers: TP leaves factors of width 8,192 whole, and cuts the others in 8."""
    worst = predicted("llama-3.1-70b-lora-8gpu", LLAMA_70B)
    adapter = 80 * 16 * (7 * 8192 + (2 * 8192 + 2 * 1024 + 3 * 28672) / 8)
    masks = 80 * 16 * (3 * (8192 + 2 * 1024) + 2 * (2 * 28672)) / 8
    assert worst.weights * GIB == pytest.approx(2 * (70.5537e9 / 8 + adapter + 2 * masks), rel=1e-3)
    assert worst.gradients * GIB == 4 * adapter
    assert worst.optimizer * GIB == 12 * adapter
    # Of a token: two norms and what they put out; queries, keys, values and attention; gate, up and their product; A x.
    kept = (4 * 8192 + 2 * (8192 + 1024) + 3 * 28672) / 8 + 7 * 16
    assert worst.activations * GIB == pytest.approx(2 * kept * 4096 * 80)
    assert 30 < worst.total < 40


def test_qwen3_30b_under_ep8():
    """Rank 8 on attention, routers and experts, 16 on their gate and up, which share an A; a GPU has 16 of 128 experts
    of three matrices of 2,048 × 768 in each of 48 layers."""
    worst = predicted("qwen3-30b-a3b-lora-megatron", QWEN3_30B)
    experts = 48 * 128 * 3 * 2048 * 768
    others = 30.5321e9 - experts
    shared = 48 * 8 * (2 * (2048 + 4096) + 2 * (2048 + 512) + (2048 + 128))
    of_experts = 48 * 128 / 8 * (16 * (2048 + 2 * 768) + 8 * (768 + 2048))
    masks = 48 * 8 * 3 * (4096 + 2 * 512)
    learning = shared + of_experts
    assert worst.weights * GIB == pytest.approx(2 * (experts / 8 + others + learning + 2 * masks), rel=1e-3)
    assert worst.gradients * GIB == 4 * learning
    assert worst.optimizer * GIB == 12 * (shared / 8 + of_experts)
    assert worst.activations * GIB == 2 * 2048 * 4096 * 48  # `recompute: full` keeps what enters each layer
    assert 20 < worst.total < 26


def test_qwen3_8b_in_four_bits_on_24_gib():
    """NF4 linear layers take half a byte a weight, a byte for each 64 and 4 for each row; the rest is in bfloat16."""
    worst = predicted("qwen3-8b-qlora-one-gpu", QWEN3_8B)
    linear = 36 * (4096 * (2 * 4096 + 2 * 1024) + 3 * 4096 * 12288)
    rows = 36 * (3 * 4096 + 2 * 1024 + 2 * 12288)
    adapter = 36 * 16 * (7 * 4096 + 2 * 4096 + 2 * 1024 + 3 * 12288)
    expected = linear * (1 / 2 + 1 / 64) + 4 * rows + 2 * (8.19074e9 - linear) + 4 * adapter
    assert worst.weights * GIB == pytest.approx(expected, rel=1e-3)
    assert (worst.gradients + worst.optimizer) * GIB == 12 * adapter
    assert worst.activations * GIB == 2 * 4096 * (2 * 2048) * 36
    assert worst.workspace * GIB > 6 * 4096 * 12288  # the widest weight while it is made of its bits
    assert worst.total < 0.9 * 22.5
