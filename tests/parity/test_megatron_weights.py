"""Megatron exports exactly the weights that it loads under any layout, and no process holds the whole model."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig

from tests.parity.megatron_cases import MODELS, make_models
from tests.parity.megatron_state import launch

SP = {"tp": 2, "sequence_parallel": True}
ROUND_TRIPS = {
    2: [
        *((model, layout) for model in MODELS for layout in (SP, {"pp": 2})),
        ("llama", {"pp": 2, "vpp": 2}),
        ("qwen3", {"pp": 2, "vpp": 2}),
        ("qwen2", {"dp_shard": 2}),
        ("qwen3-moe", {"dp_shard": 2, "ep": 2}),
        ("qwen3-moe", {**SP, "etp": 2}),
        ("qwen3-moe", {**SP, "ep": 2}),
    ],
    4: [
        ("llama", {"tp": 4}),
        ("qwen2", {"tp": 4}),
        ("qwen3", {"tp": 2, "pp": 2}),
        ("qwen3", {"pp": 4}),
        ("qwen3", {"tp": 2, "pp": 2, "vpp": 2}),
        ("qwen3-moe", {**SP, "pp": 2, "ep": 2}),
        ("qwen3-moe", {**SP, "dp_shard": 2, "ep": 2, "etp": 2}),
        ("qwen3-moe-dense", {"dp_shard": 2, "pp": 2, "ep": 2}),
    ],
}
"""Models and layouts to load and export, by processes. TP 4 exceeds two key/value heads; the vocabulary is odd."""

SHARD_BYTES, NUM_LAYERS, HIDDEN, INNER, VOCABULARY = 40_000_000, 12, 768, 2048, 4096
LAYER_BYTES = 4 * (4 * HIDDEN * HIDDEN + 3 * HIDDEN * INNER)
ALLOWANCE_BYTES = 16_000_000
"""Memory in bytes that Python, gloo and the allocator may use besides the weights."""


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    make_models(folder)
    make_large_model(folder / "large")
    return folder


def make_large_model(folder):
    """Write an fp32 model of 340 MB in one file for each layer."""
    folder.mkdir()
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=HIDDEN, intermediate_size=INNER, num_hidden_layers=NUM_LAYERS,
        num_attention_heads=12, num_key_value_heads=12, tie_word_embeddings=False,
    )  # fmt: skip
    config.save_pretrained(folder)
    names = [f"self_attn.{letter}_proj" for letter in "qkvo"]
    index = {}
    for layer in range(NUM_LAYERS):
        square = {f"{name}.weight": torch.randn(HIDDEN, HIDDEN) for name in names}
        wide = {f"mlp.{name}_proj.weight": torch.randn(INNER, HIDDEN) for name in ("gate", "up")}
        norms = {f"{name}_layernorm.weight": torch.ones(HIDDEN) for name in ("input", "post_attention")}
        weights = {**square, **wide, **norms, "mlp.down_proj.weight": torch.randn(HIDDEN, INNER)}
        named = {f"model.layers.{layer}.{name}": weight for name, weight in weights.items()}
        save_file(named, folder / f"{layer}.safetensors")
        index |= dict.fromkeys(named, f"{layer}.safetensors")
    ends = {name: torch.randn(VOCABULARY, HIDDEN) for name in ("model.embed_tokens.weight", "lm_head.weight")}
    ends["model.norm.weight"] = torch.ones(HIDDEN)
    save_file(ends, folder / "ends.safetensors")
    index |= dict.fromkeys(ends, "ends.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))


@pytest.fixture(scope="module")
def exported(megatron_ranks, models, tmp_path_factory):
    """Provide the folder of models that Megatron loaded and exported under layouts of two and of four processes."""
    output = tmp_path_factory.mktemp("exported")
    memory = {"model": "large", "layout": {"tp": 2}, "shard_bytes": SHARD_BYTES}
    launch(megatron_ranks, 2, models, output, round_trips=ROUND_TRIPS[2], memory=memory)
    launch(megatron_ranks, 4, models, output, round_trips=ROUND_TRIPS[4])
    return output


@pytest.mark.parametrize("processes", ROUND_TRIPS)
def test_every_weight_comes_back_bit_by_bit(exported, models, processes):
    for index, (model, layout) in enumerate(ROUND_TRIPS[processes]):
        original = load_file(models / model / "model.safetensors")
        found = load_file(exported / f"{processes}-{index}" / "model.safetensors")
        assert found.keys() == original.keys(), (model, layout)
        assert all(torch.equal(found[name], weight) for name, weight in original.items()), (model, layout)


def test_reading_takes_less_than_a_layer_and_writing_less_than_a_shard_and_a_layer(exported):
    used = json.loads((exported / "memory.json").read_text())
    assert used["reading"] < LAYER_BYTES + ALLOWANCE_BYTES, used
    assert used["writing"] < SHARD_BYTES + LAYER_BYTES + ALLOWANCE_BYTES, used
    assert len(list((exported / "measured").glob("*.safetensors"))) > 5
