"""Models that cannot be trained or exported are refused before the first training step, with the cause."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, GPT2Config, Llama4TextConfig, LlamaConfig, PreTrainedConfig

from stages.core.errors import ModelError
from stages.engines.export import check_exportable, export_model
from stages.engines.fsdp.model import load_model
from stages.models.facts import ModelFacts

SIZES = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
Weights = dict[str, torch.Tensor]


def save(folder: Path, config: PreTrainedConfig) -> Path:
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return folder


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return save(tmp_path / "model", LlamaConfig(**SIZES))


def load(folder: Path) -> Any:
    model = load_model(folder, reads_weights=True, trust_remote_code=False).causal_lm
    check_exportable(model, folder)
    return model


def change_weights(folder: Path, change: Callable[[Weights], Weights]) -> None:
    path = folder / "model.safetensors"
    save_file(change(load_file(path)), path, metadata={"format": "pt"})


def change_config(folder: Path, **fields: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_nan_and_infinity_are_called_so(folder: Path, value: float) -> None:
    name = "model.layers.1.mlp.up_proj.weight"
    change_weights(folder, lambda weights: {**weights, name: torch.full_like(weights[name], value)})
    with pytest.raises(ModelError, match=rf"1 weights hold NaN or infinity \({name}\)"):
        load(folder)


def test_a_tensor_too_many_is_refused(folder: Path) -> None:
    change_weights(folder, lambda weights: {**weights, "model.extra.weight": torch.ones(2, 2)})
    with pytest.raises(ModelError, match=r"holds 1 weights that LlamaForCausalLM does not have .*model\.extra\.weight"):
        load(folder)


def test_fewer_layers_in_the_config_than_in_the_files_are_refused(folder: Path) -> None:
    change_config(folder, num_hidden_layers=1)
    with pytest.raises(ModelError, match=r"9 weights .*model\.layers\.1\..* config\.json may say fewer layers"):
        load(folder)


def test_a_head_under_a_config_that_ties_by_default_is_refused(tmp_path: Path) -> None:
    folder = save(tmp_path / "model", GPT2Config(vocab_size=64, n_embd=32, n_layer=1, n_head=2, eos_token_id=2))
    load(folder)
    change_weights(folder, lambda weights: {**weights, "lm_head.weight": torch.ones(64, 32)})
    with pytest.raises(ModelError, match="a head that is not the embedding; say false in config"):
        load(folder)


@pytest.mark.parametrize(
    ("field", "value"),
    [("hidden_act", "no such thing"), ("model_type", "no such thing"), ("rope_parameters", {"rope_type": "odd"})],
)
def test_what_transformers_cannot_build_is_a_named_error(folder: Path, field: str, value: Any) -> None:
    change_config(folder, **{field: value})
    with pytest.raises(ModelError, match=f"loading {folder} as a causal language model"):
        load(folder)


def test_what_the_architecture_leaves_in_the_files_stays_in_them(folder: Path, tmp_path: Path) -> None:
    ignored = "model.layers.7.head.weight"  # as DeepSeek-V3's layer 61, which predicts further tokens
    change_weights(folder, lambda weights: {**weights, ignored: torch.ones(3, dtype=torch.float16)})
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    model._keys_to_ignore_on_load_unexpected = [r"model\.layers\.7\..*"]
    check_exportable(model, folder)
    target = tmp_path / "exported"
    export_model(model, model.state_dict().items(), source=ModelFacts(folder), folder=target, dtype=torch.bfloat16)
    exported = load_file(target / "model.safetensors")
    assert exported.keys() == load_file(folder / "model.safetensors").keys()
    assert torch.equal(exported[ignored], torch.ones(3, dtype=torch.float16))


def test_files_of_a_model_without_its_head_are_written_under_their_names(tmp_path: Path) -> None:
    folder = save(tmp_path / "gpt2", GPT2Config(vocab_size=64, n_embd=32, n_layer=1, n_head=2, eos_token_id=2))
    mask = torch.ones(1, 1, 4, 4)  # as in the published files
    published = {
        **{
            name.removeprefix("transformer."): weight
            for name, weight in load_file(folder / "model.safetensors").items()
        },
        "h.0.attn.bias": mask,
    }
    change_weights(folder, lambda weights: published)
    model = load(folder)
    target = tmp_path / "exported"
    export_model(model, model.state_dict().items(), source=ModelFacts(folder), folder=target, dtype=torch.float32)
    exported = load_file(target / "model.safetensors")
    assert exported.keys() == published.keys()
    assert all(torch.equal(exported[name], weight) for name, weight in published.items())


def test_files_that_are_not_the_models_are_left_alone(folder: Path) -> None:
    save_file({"layers.0.wq": torch.ones(2, 2)}, folder / "consolidated.safetensors")
    load(folder)


def test_llama_4_is_loaded_and_can_be_written_again(tmp_path: Path) -> None:
    experts = {"intermediate_size_mlp": 48, "num_local_experts": 4, "attention_chunk_size": 8, "head_dim": 8}
    load(save(tmp_path / "model", Llama4TextConfig(**SIZES, **experts)))
