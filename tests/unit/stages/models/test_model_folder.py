"""Model folders are accepted only with complete config, weights and tokenizer; errors name the file."""

import json
import re
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from stages.core.errors import ModelError
from stages.models.facts import ModelFacts
from stages.models.model_folder import check_model_folder


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text('{"model_type": "qwen3"}')
    (tmp_path / "tokenizer.json").write_text("{}")
    save_file({"a": np.ones((4, 8), np.float32), "b": np.ones(3, np.int64)}, tmp_path / "model.safetensors")
    return tmp_path


def shard(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    for number, name in enumerate(["a", "b"]):
        save_file({name: np.zeros(number + 1)}, folder / f"model-{number}.safetensors")
    weight_map = {"a": "model-0.safetensors", "b": "model-1.safetensors"}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


def assert_refused(folder: Path, *words: str) -> None:
    with pytest.raises(ModelError) as caught:
        check_model_folder(ModelFacts(folder))
    for word in words:
        assert word in str(caught.value)


def test_accepts_a_complete_folder_and_a_sharded_one(folder: Path) -> None:
    check_model_folder(ModelFacts(folder))
    shard(folder)
    check_model_folder(ModelFacts(folder))


def test_a_missing_folder_is_named(tmp_path: Path) -> None:
    assert_refused(tmp_path / "nowhere", "nowhere")


@pytest.mark.parametrize("content", ["", "{", "[]", "{}"])
def test_refuses_a_config_that_is_none(folder: Path, content: str) -> None:
    (folder / "config.json").write_text(content)
    assert_refused(folder, "config.json")


def test_refuses_a_folder_without_config(folder: Path) -> None:
    (folder / "config.json").unlink()
    assert_refused(folder, "no config.json")


def test_refuses_weights_that_are_cut_anywhere(folder: Path) -> None:
    weights = folder / "model.safetensors"
    whole = weights.read_bytes()
    for length in range(0, len(whole), 7):
        weights.write_bytes(whole[:length])
        assert_refused(folder, "model.safetensors", f"{length} bytes")


def test_refuses_weights_with_bytes_too_many_or_a_damaged_header(folder: Path) -> None:
    weights = folder / "model.safetensors"
    whole = weights.read_bytes()
    for damaged in (whole + b"\0", re.sub(rb"data_offsets", rb"data_offsetz", whole, count=1), b"\xff" * 8 + whole[8:]):
        weights.write_bytes(damaged)
        assert_refused(folder, "model.safetensors")


def test_refuses_pickled_weights_but_tolerates_them_beside_safetensors(folder: Path) -> None:
    (folder / "pytorch_model.bin").write_bytes(b"pickle")
    check_model_folder(ModelFacts(folder))
    (folder / "model.safetensors").unlink()
    assert_refused(folder, "pytorch_model.bin", "can run any code", "safetensors")


def test_refuses_a_folder_without_weights_or_with_an_adapter_only(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "adapter_model.safetensors")
    assert_refused(folder, "adapter")
    (folder / "adapter_model.safetensors").unlink()
    assert_refused(folder, "no weights")


def test_names_the_shard_that_is_missing_or_of_another_model(folder: Path) -> None:
    shard(folder)
    save_file({"other": np.zeros(1)}, folder / "model-1.safetensors")
    assert_refused(folder, "model-1.safetensors", "different models")
    (folder / "model-1.safetensors").unlink()
    assert_refused(folder, "model-1.safetensors", "missing")
    (folder / "model.safetensors.index.json").write_text('{"weight_map": {}}')
    assert_refused(folder, "weight_map")


def test_a_tokenizer_is_needed(folder: Path) -> None:
    (folder / "tokenizer.json").unlink()
    assert_refused(folder, "no tokenizer")
    (folder / "tokenizer.json").write_text('{"half')
    assert_refused(folder, "tokenizer.json")
