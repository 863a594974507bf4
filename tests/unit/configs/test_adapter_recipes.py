"""Adapter recipes fit their GPUs, and their predicted memory equals the computation by hand in their comments."""

import pytest

from stages.models.facts import ModelFacts
from stages.planner.memory import GIB, StageMemory, memory
from tests.unit.configs.test_megatron_recipes import LLAMA_70B, QWEN3_8B, QWEN3_30B, training_stages


def predicted(name: str, config: dict) -> StageMemory:
    (stage,) = training_stages(name)
    return memory(ModelFacts(config).shape, stage.engine, stage.layout, stage.workload).worst


def test_llama_70b_under_tp8():
    """Predicted memory of a 70B LoRA training under tensor parallelism of 8 equals a computation by hand.

    LoRA rank is 16, on seven matrices of each of 80 layers. LoRA factors of width 8,192 stay whole, all others are cut
    in 8.
    """
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
    """Predicted memory of LoRA on Qwen3-30B-A3B under expert parallelism of 8 equals a computation by hand.

    LoRA rank is 8 on attention, routers and experts, and 16 on the experts' gate and up matrices, which share a factor
    A. In each of 48 layers, a GPU has 16 of 128 experts, each of three matrices of 2,048 × 768.
    """
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
    assert 14 < worst.total < 17  # logits in chunks: a billion bytes instead of six


def test_qwen3_8b_in_four_bits_on_24_gib():
    """Predicted memory of a QLoRA training of Qwen3-8B equals a computation by hand, and fits a GPU of 24 GiB.

    NF4 takes half a byte a weight, one byte for each 64 weights and 4 bytes for each row; other weights are in
    bfloat16.
    """
    worst = predicted("qwen3-8b-qlora-one-gpu", QWEN3_8B)
    linear = 36 * (4096 * (2 * 4096 + 2 * 1024) + 3 * 4096 * 12288)
    rows = 36 * (3 * 4096 + 2 * 1024 + 2 * 12288)
    adapter = 36 * 16 * (7 * 4096 + 2 * 4096 + 2 * 1024 + 3 * 12288)
    expected = linear * (1 / 2 + 1 / 64) + 4 * rows + 2 * (8.19074e9 - linear) + 4 * adapter
    assert worst.weights * GIB == pytest.approx(expected, rel=1e-3)
    assert (worst.gradients + worst.optimizer) * GIB == 12 * adapter
    assert worst.activations * GIB == 2 * 4096 * (2 * 2048) * 36
    # The fullest moment is the head's: a chunk of 2²⁷ logits takes more than the widest weight, made of its bits.
    assert worst.logits * GIB > 8 * 2**27 > 2 * 4096 * 12288
    assert worst.workspace == worst.communication == 0
    assert worst.total < 0.9 * 22.5
