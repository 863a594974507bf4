"""Shards of weights that are read from a model's files equal Transformers' weights, for every kind of layer."""

import math
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from stages.core.errors import ModelError
from stages.engines.fsdp.model import find_weights
from stages.engines.fsdp.sources import ModelFiles
from tests.zoo.models import tiny_model

PROCESSES = 3
"""Number of processes that divides neither the vocabulary nor four experts evenly."""
VOCABULARY = 61

FAMILIES = {
    "llama": "llama",
    "tied": "gemma2",
    "conv1d": "gpt2",
    "joined": "phi3",
    "bloom": "bloom",
    "mamba": "mamba",
    "qwen3 experts": "qwen3_moe",
    "mixtral": "mixtral",
    "router bias": "deepseek_v3",
    "glm": "glm4_moe",
    "stacked in files": "gpt_oss",
    "granite": "granitemoe",
    "llama 4": "llama4_text",
    "ernie": "ernie4_5_moe",
    "cut and joined": "hrm_text",
}
"""Families of the zoo, by what is special in their files."""


def save(name: str, folder: Path) -> Path:
    model = tiny_model(FAMILIES[name], vocab_size=VOCABULARY)
    for weight in model.parameters():
        torch.nn.init.normal_(weight)
    model.save_pretrained(folder)
    return folder


def files_of(folder: Path) -> ModelFiles:
    return find_weights(folder, trust_remote_code=False)[1]


def shard(weight: Tensor, process: int) -> slice:
    size = math.ceil(len(weight) / PROCESSES)
    return slice(min(process * size, len(weight)), min((process + 1) * size, len(weight)))


@pytest.mark.parametrize("name", FAMILIES)
def test_shards_of_all_processes_are_the_weights(name: str, tmp_path: Path) -> None:
    folder = save(name, tmp_path)
    weights = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).state_dict()
    files = files_of(folder)
    parts: dict[str, list[Tensor]] = {}
    for process in range(PROCESSES):
        for weight, rows in files.read(lambda weight, process=process: shard(weights[weight], process)):
            parts.setdefault(weight, []).append(rows)
    tied = AutoModelForCausalLM.from_pretrained(folder).all_tied_weights_keys
    assert parts.keys() == weights.keys() - tied.keys()
    for weight, rows in parts.items():
        assert torch.equal(torch.cat(rows), weights[weight]), weight


def test_scalars_have_no_rows_and_are_read_whole(tmp_path: Path) -> None:
    tiny_model("apertus").save_pretrained(tmp_path)  # whose activation keeps two
    weights = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).state_dict()
    read = dict(files_of(tmp_path).read(lambda _: slice(None)))
    scalars = [name for name, weight in weights.items() if not weight.ndim]
    assert scalars
    assert all(torch.equal(read[name].float(), weights[name]) for name in scalars)


def test_experts_of_other_processes_are_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = files_of(save("qwen3 experts", tmp_path))
    stacked: list[int] = []
    stack = torch.stack

    def counted(tensors: list[Tensor], dim: int) -> Tensor:
        stacked.append(len(tensors))
        return stack(tensors, dim=dim)

    monkeypatch.setattr(torch, "stack", counted)
    name = "model.layers.0.mlp.experts.gate_up_proj"
    (found,) = dict(files.read(lambda weight: slice(1, 2) if weight == name else None)).values()
    assert found.shape == (1, 2 * 64, 64)
    assert stacked == [1, 1], "gate and up, of one expert"


def change(folder: Path, **weights: Tensor | None) -> None:
    path = folder / "model.safetensors"
    kept = {**load_file(path), **weights}
    save_file({name: one for name, one in kept.items() if one is not None}, path, metadata={"format": "pt"})


def test_missing_and_mismatched_weights_are_named(tmp_path: Path) -> None:
    folder = save("qwen3 experts", tmp_path)
    change(folder, **{"model.norm.weight": None, "model.layers.1.self_attn.q_proj.weight": torch.ones(2, 2)})
    with pytest.raises(ModelError, match=r"1 weights are missing and 1 have another shape .*model\.norm.*q_proj"):
        files_of(folder)


def test_a_tied_head_that_is_in_the_files_must_be_the_embedding(tmp_path: Path) -> None:
    folder = save("tied", tmp_path)
    embedding = load_file(folder / "model.safetensors")["model.embed_tokens.weight"]
    change(folder, **{"lm_head.weight": embedding.clone()})
    assert not files_of(folder).has_untied()
    change(folder, **{"lm_head.weight": embedding + 1})
    with pytest.raises(ModelError, match="a head that is not the embedding"):
        files_of(folder)
