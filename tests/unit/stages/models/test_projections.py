"""Linear layers of a model folder are found by its safetensors headers."""

import numpy as np
import pytest
from safetensors.numpy import save_file

from stages.models.linear_layers import Projection, Split, matches, read_projections


def test_matrices_of_all_shards_are_read_and_embeddings_norms_and_biases_are_not(tmp_path):
    first = {
        "model.embed_tokens.weight": np.zeros((16, 8)),
        "model.layers.0.self_attn.q_proj.weight": np.zeros((12, 8)),
        "model.layers.0.self_attn.q_proj.bias": np.zeros(12),
    }
    second = {"model.norm.weight": np.zeros(8), "lm_head.weight": np.zeros((16, 8))}
    save_file(first, tmp_path / "model-00001-of-00002.safetensors")
    save_file(second, tmp_path / "model-00002-of-00002.safetensors")
    assert read_projections(tmp_path) == [
        Projection("lm_head", 16, 8),
        Projection("model.layers.0.self_attn.q_proj", 12, 8),
    ]


@pytest.mark.parametrize(("suffix", "split"), [
    ("q_proj", Split.OUTPUT), ("up_proj", Split.OUTPUT), ("w3", Split.OUTPUT),
    ("o_proj", Split.INPUT), ("down_proj", Split.INPUT), ("w2", Split.INPUT), ("gate", Split.NOTHING),
])  # fmt: skip
def test_layers_are_split_as_their_names_say(suffix, split):
    assert Projection(f"model.layers.0.x.{suffix}", 8, 8).split is split


def test_experts_are_fused_within_themselves():
    gate = Projection("model.layers.0.mlp.experts.0.gate_proj", 8, 8)
    assert gate.fused_name == Projection("model.layers.0.mlp.experts.0.up_proj", 8, 8).fused_name
    assert gate.fused_name != Projection("model.layers.0.mlp.experts.1.up_proj", 8, 8).fused_name


def test_patterns_match_as_llm_compressor_matches_them():
    assert matches("lm_head", ("lm_head",))
    assert not matches("model.lm_head", ("lm_head",))
    assert matches("model.layers.3.mlp.up_proj", (r"re:.*layers\.3\.",))
    assert not matches("model.layers.3.mlp.up_proj", (r"re:layers",))
