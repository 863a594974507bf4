"""Exported models are complete: all tensors and companion files, in shards that Transformers reads."""

import json

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, Qwen3Config, Qwen3ForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

from stages.adapters.config import AdapterConfig
from stages.core.errors import ModelError
from stages.data.batch import Batch, Documents
from stages.engines import export
from stages.engines.export import export_model, weight_shapes
from stages.engines.fsdp.engine import FsdpEngine
from stages.engines.settings import AdamSettings, EngineSettings
from stages.kinds.train.methods.sft import SftLoss
from stages.models.facts import ModelFacts
from stages.parallel.layout import Layout
from stages.parallel.processes import joined_processes

SIZES = {
    "vocab_size": 32,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 8,
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8}


@pytest.fixture(params=["tied", "untied", "moe"])
def source(request, tmp_path):
    torch.manual_seed(0)
    if request.param == "moe":
        model = Qwen3MoeForCausalLM(Qwen3MoeConfig(**SIZES, **EXPERTS))
    else:
        model = Qwen3ForCausalLM(
            Qwen3Config(**SIZES, intermediate_size=24, tie_word_embeddings=request.param == "tied")
        )
    folder = tmp_path / "source"
    model.save_pretrained(folder)
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    (folder / "tokenizer.json").write_text("{}")
    (folder / "pytorch_model.bin").write_text("pickle")
    return folder


def load(folder):
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


def exported(source, folder, dtype=torch.float32):
    model = load(source)
    export_model(model, model.state_dict().items(), source=ModelFacts(source), folder=folder, dtype=dtype)
    return folder


def test_an_unchanged_model_is_exported_as_it_was(source, tmp_path):
    folder = exported(source, tmp_path / "exported")
    expected = load_file(source / "model.safetensors")
    found = load_file(folder / "model.safetensors")
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], weight) for name, weight in expected.items())


def test_shards_are_indexed_and_loaded_by_transformers(source, tmp_path, monkeypatch):
    monkeypatch.setattr(export, "MAX_SHARD_BYTES", 4000)
    folder = exported(source, tmp_path / "exported")
    shards = sorted(path.name for path in folder.glob("*.safetensors"))
    assert len(shards) > 2
    assert shards[0] == f"model-00001-of-{len(shards):05}.safetensors"
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    assert index["weight_map"].keys() == weight_shapes(source).keys()
    assert set(index["weight_map"].values()) == set(shards)
    assert all(
        torch.equal(weight, load(source).state_dict()[name]) for name, weight in load(folder).state_dict().items()
    )


def test_companions_come_along_and_pickles_do_not(source, tmp_path):
    folder = exported(source, tmp_path / "exported", torch.bfloat16)
    names = {path.name for path in folder.iterdir()}
    assert names == {path.name for path in source.iterdir()} - {"pytorch_model.bin"}
    assert json.loads((folder / "config.json").read_text())["dtype"] == "bfloat16"
    assert {weight.dtype for weight in load_file(folder / "model.safetensors").values()} == {torch.bfloat16}


def test_a_lost_weight_is_an_error(source, tmp_path):
    model = load(source)
    weights = [(name, weight) for name, weight in model.state_dict().items() if "layers.1.self_attn.q_proj" not in name]
    with pytest.raises(ModelError, match=r"1 weights are lost .*layers\.1\.self_attn\.q_proj\.weight"):
        export_model(model, weights, source=ModelFacts(source), folder=tmp_path / "exported", dtype=torch.float32)


def test_an_adapter_that_was_evaluated_is_exported_in_full_precision(source, tmp_path):
    """An adapter's export is the same before and after an evaluation that leaves its bf16 copies gathered."""
    tokens = torch.arange(13) % 32
    documents = Documents(torch.zeros(1, 12, dtype=torch.int64), 1, [12])
    batch = Batch.of(tokens[None, :-1], tokens[None, 1:], torch.arange(12)[None], documents)
    layout = Layout(reshard_after_forward=False)
    settings = EngineSettings(layout, "bf16", AdamSettings(1e-2), adapter=AdapterConfig(rank=2))
    with joined_processes() as device:
        engine = FsdpEngine(ModelFacts(source), settings, device)
        engine.train_step([batch], SftLoss(), 1e-2, None)
        engine.export(tmp_path / "trained", torch.float32)
        engine.evaluate([batch], SftLoss())
        engine.export(tmp_path / "evaluated", torch.float32)
    trained, evaluated = (load_file(tmp_path / name / "adapter_model.safetensors") for name in ("trained", "evaluated"))
    assert trained.keys() == evaluated.keys()
    assert all(torch.equal(evaluated[name], weight) for name, weight in trained.items())
    assert any(not torch.equal(weight, weight.bfloat16().float()) for weight in trained.values())
