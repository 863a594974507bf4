"""Before a running vLLM reloads weights, a tied output head is written out; other models stay unchanged."""

import json
import socket

import pytest
import torch
from safetensors.torch import load_file, save_file

from stages.core.errors import TransientError
from stages.serving.backend import EngineAddress
from stages.serving.vllm.swap import prepare_reloads, reload_weights


def test_a_tied_head_is_written_out_and_said_to_be_untied(tmp_path):
    embedding = torch.arange(6.0).view(3, 2).bfloat16()
    save_file({"model.embed_tokens.weight": embedding}, tmp_path / "model-00001-of-00002.safetensors")
    save_file({"model.norm.weight": torch.ones(2)}, tmp_path / "model-00002-of-00002.safetensors")
    index = {"metadata": {}, "weight_map": {"model.embed_tokens.weight": "model-00001-of-00002.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    (tmp_path / "config.json").write_text('{"tie_word_embeddings": true, "vocab_size": 3}')
    prepare_reloads(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text()) == {"tie_word_embeddings": False, "vocab_size": 3}
    weight_map = json.loads((tmp_path / "model.safetensors.index.json").read_text())["weight_map"]
    assert weight_map["model.embed_tokens.weight"] == "model-00001-of-00002.safetensors"
    assert torch.equal(load_file(tmp_path / weight_map["lm_head.weight"])["lm_head.weight"], embedding)


def test_a_model_with_a_head_of_its_own_stays_as_it_is(tmp_path):
    (tmp_path / "config.json").write_text('{"tie_word_embeddings": false}')
    prepare_reloads(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["config.json"]


def test_a_server_that_hangs_is_given_up_in_time(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as hanging, pytest.raises(TransientError, match="TimeoutError"):
        reload_weights(EngineAddress(port=hanging.getsockname()[1]), "key", tmp_path, timeout_s=0.2)
