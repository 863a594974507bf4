"""Shards of weights that are read from a model's files equal Transformers' weights, for every kind of layer."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    BloomConfig,
    DeepseekV3Config,
    Ernie4_5_MoeConfig,
    Gemma2Config,
    Glm4MoeConfig,
    GPT2Config,
    GptOssConfig,
    GraniteMoeConfig,
    HrmTextConfig,
    Llama4TextConfig,
    LlamaConfig,
    MambaConfig,
    MixtralConfig,
    Phi3Config,
    PreTrainedConfig,
    Qwen3MoeConfig,
)

from stages.core.errors import ModelError
from stages.engines.fsdp.model import find_weights
from stages.engines.fsdp.sources import ModelFiles

SHAPE = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 16}
LATENT = {"q_lora_rank": 8, "kv_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 8, "v_head_dim": 6}
PROCESSES = 3
"""Number of processes that divides neither the vocabulary nor four experts evenly."""

CONFIGS: dict[str, Callable[[], PreTrainedConfig]] = {
    "llama": lambda: LlamaConfig(**SHAPE),
    "tied": lambda: Gemma2Config(**SHAPE, head_dim=8),
    "conv1d": lambda: GPT2Config(vocab_size=61, n_embd=32, n_layer=2, n_head=4, n_positions=32),
    "joined": lambda: Phi3Config(**SHAPE),
    "bloom": lambda: BloomConfig(vocab_size=61, hidden_size=32, n_layer=2, n_head=4),
    "mamba": lambda: MambaConfig(vocab_size=61, hidden_size=32, num_hidden_layers=2, state_size=4),
    "qwen3 experts": lambda: Qwen3MoeConfig(**SHAPE, **EXPERTS, head_dim=8, num_experts=4),
    "mixtral": lambda: MixtralConfig(**SHAPE, num_local_experts=4),
    "router bias": lambda: DeepseekV3Config(
        **{**SHAPE, "num_key_value_heads": 4}, **EXPERTS, **LATENT, n_routed_experts=4, n_group=1, topk_group=1
    ),
    "glm": lambda: Glm4MoeConfig(**SHAPE, **EXPERTS, n_routed_experts=4, head_dim=8, first_k_dense_replace=1),
    "stacked in files": lambda: GptOssConfig(**SHAPE, head_dim=8, num_local_experts=4, num_experts_per_tok=2),
    "granite": lambda: GraniteMoeConfig(**SHAPE, num_local_experts=4, num_experts_per_tok=2),
    "llama 4": lambda: Llama4TextConfig(
        **SHAPE, head_dim=8, intermediate_size_mlp=48, num_local_experts=4, attention_chunk_size=8
    ),
    "ernie": lambda: Ernie4_5_MoeConfig(**SHAPE, moe_num_experts=4, moe_k=2, moe_intermediate_size=16),
    "cut and joined": lambda: HrmTextConfig(**SHAPE, head_dim=8),
}


def save(config: PreTrainedConfig, folder: Path) -> Path:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config)
    for weight in model.parameters():
        torch.nn.init.normal_(weight)
    model.save_pretrained(folder)
    return folder


def files_of(folder: Path) -> ModelFiles:
    return find_weights(folder, trust_remote_code=False)[1]


def shard(weight: Tensor, process: int) -> slice:
    size = math.ceil(len(weight) / PROCESSES)
    return slice(min(process * size, len(weight)), min((process + 1) * size, len(weight)))


@pytest.mark.parametrize("name", CONFIGS)
def test_shards_of_all_processes_are_the_weights(name: str, tmp_path: Path) -> None:
    folder = save(CONFIGS[name](), tmp_path)
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


def test_experts_of_other_processes_are_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = files_of(save(CONFIGS["qwen3 experts"](), tmp_path))
    stacked: list[int] = []
    stack = torch.stack

    def counted(tensors: list[Tensor], dim: int) -> Tensor:
        stacked.append(len(tensors))
        return stack(tensors, dim=dim)

    monkeypatch.setattr(torch, "stack", counted)
    name = "model.layers.0.mlp.experts.gate_up_proj"
    (found,) = dict(files.read(lambda weight: slice(1, 2) if weight == name else None)).values()
    assert found.shape == (1, 32, 32)
    assert stacked == [1, 1], "gate and up, of one expert"


def change(folder: Path, **weights: Tensor | None) -> None:
    path = folder / "model.safetensors"
    kept = {**load_file(path), **weights}
    save_file({name: one for name, one in kept.items() if one is not None}, path, metadata={"format": "pt"})


def test_missing_and_mismatched_weights_are_named(tmp_path: Path) -> None:
    folder = save(CONFIGS["qwen3 experts"](), tmp_path)
    change(folder, **{"model.norm.weight": None, "model.layers.1.self_attn.q_proj.weight": torch.ones(2, 2)})
    with pytest.raises(ModelError, match=r"1 weights are missing and 1 have another shape .*model\.norm.*q_proj"):
        files_of(folder)


def test_a_tied_head_that_is_in_the_files_must_be_the_embedding(tmp_path: Path) -> None:
    folder = save(CONFIGS["tied"](), tmp_path)
    embedding = load_file(folder / "model.safetensors")["model.embed_tokens.weight"]
    change(folder, **{"lm_head.weight": embedding.clone()})
    assert not files_of(folder).has_untied()
    change(folder, **{"lm_head.weight": embedding + 1})
    with pytest.raises(ModelError, match="a head that is not the embedding"):
        files_of(folder)
