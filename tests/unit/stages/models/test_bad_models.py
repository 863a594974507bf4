"""Invalid model folders are refused with the right error; each test changes a valid folder in one way."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES,
)

from stages.core.errors import ModelError
from stages.models.facts import ModelFacts
from stages.models.model_folder import check_model_folder, check_unquantized, other_architecture

CONFIG = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "num_hidden_layers": 2,
    "hidden_size": 8,
    "intermediate_size": 16,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 10,
    "tie_word_embeddings": False,
    "eos_token_id": 2,
    "dtype": "bfloat16",
}
EMBEDDING, LAYER, HEAD = "model.embed_tokens.weight", "model.layers.0.mlp.up_proj.weight", "lm_head.weight"
Change = Callable[[Path], None]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    (tmp_path / "tokenizer.json").write_text(json.dumps(tokenizer(10)))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": "t2"}))
    generator = np.random.default_rng(0)
    shapes = {EMBEDDING: (10, 8), LAYER: (16, 8), HEAD: (10, 8)}
    weights = {name: generator.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}
    save_file(weights, tmp_path / "model.safetensors")
    return tmp_path


def tokenizer(num_tokens: int, added: dict[str, int] | None = None) -> dict[str, Any]:
    vocabulary = {f"t{number}": number for number in range(num_tokens)}
    return {
        "model": {"type": "BPE", "vocab": vocabulary, "merges": []},
        "added_tokens": [{"content": token, "id": number} for token, number in (added or {}).items()],
    }


def config(**fields: Any) -> Change:
    return lambda folder: (folder / "config.json").write_text(json.dumps({**CONFIG, **fields})) and None


def text(name: str, content: str | bytes) -> Change:
    data = content.encode() if isinstance(content, str) else content
    return lambda folder: (folder / name).write_bytes(data) and None


def weights(change: Callable[[dict[str, Any]], dict[str, Any]]) -> Change:
    def rewrite(folder: Path) -> None:
        found = load_file(folder / "model.safetensors")
        (folder / "model.safetensors").unlink()
        save_file(change(found), folder / "model.safetensors")

    return rewrite


def sharded(**changes: Any) -> Change:
    """Return a function that splits weights into two shards with an index, whose `weight_map` has `changes`."""

    def rewrite(folder: Path) -> None:
        found = load_file(folder / "model.safetensors")
        (folder / "model.safetensors").unlink()
        files = {EMBEDDING: "model-1.safetensors", LAYER: "model-2.safetensors", HEAD: "model-2.safetensors"}
        for file in sorted(set(files.values())):
            save_file({name: found[name] for name in found if files[name] == file}, folder / file)
        kept = {name: file for name, file in {**files, **changes}.items() if file is not None}
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": kept}))

    return rewrite


def both(folder: Path) -> None:
    content = (folder / "model.safetensors").read_bytes()
    sharded()(folder)
    (folder / "model.safetensors").write_bytes(content)


REFUSED: dict[str, tuple[Change, str]] = {
    "index is a list": (text("model.safetensors.index.json", "[]"), "index.json holds a JSON list, not an object"),
    "index of lists": (
        text("model.safetensors.index.json", '{"weight_map": {"a": ["b"]}}'), r"a is in \['b'\], which is missing",
    ),
    "weight_map is a list": (text("model.safetensors.index.json", '{"weight_map": []}'), "has no `weight_map`"),
    "index lists too few": (sharded(**{HEAD: None}), r"does not list 1 tensors .*lm_head\.weight in model-2"),
    "index and single file": (both, r"has both model\.safetensors and model\.safetensors\.index\.json"),
    "config is UTF-16": (text("config.json", json.dumps(CONFIG).encode("utf-16")), "UTF-8: 'utf-8' codec"),
    "config is nested deeply": (text("config.json", '{"a":' * 100_000), "nested too deeply"),
    "config is a list": (text("config.json", "[]"), "holds a JSON list"),
    "layers -1": (config(num_hidden_layers=-1), "num_hidden_layers is -1, expected a positive whole number"),
    "10^9 layers": (config(num_hidden_layers=10**9), "num_hidden_layers is 1000000000, expected at most 2048"),
    "a million layers of a tower": (
        config(vision_config={"num_hidden_layers": 10**6}), r"vision_config\.num_hidden_layers is 1000000, expected",
    ),
    "layers in quotes": (config(num_hidden_layers="4"), "num_hidden_layers is '4', expected"),
    "hidden null": (config(hidden_size=None), "hidden_size is None, expected"),
    "heads 0": (config(num_attention_heads=0), "num_attention_heads is 0, expected"),
    "heads true": (config(num_attention_heads=True), "num_attention_heads is True, expected"),
    "groups that do not divide": (config(num_key_value_heads=3), "4 is not divisible by num_key_value_heads 3"),
    "type is a list": (config(model_type=["llama"]), r"model_type is \['llama'\], expected a name"),
    "architectures is a text": (config(architectures="Llama"), "architectures is 'Llama', expected a list"),
    "padding beyond": (config(pad_token_id=10), "pad_token_id 10 is beyond the vocabulary of 10 tokens"),
    "end beyond": (config(eos_token_id=[2, 99]), "eos_token_id 99 is beyond the vocabulary"),
    "end is a text": (config(eos_token_id="</s>"), "eos_token_id is '</s>', expected a token's number"),
    "end of answers beyond": (
        text("generation_config.json", '{"eos_token_id": 10}'), r"generation_config\.json: eos_token_id 10 is beyond",
    ),
    "unknown dtype": (config(dtype="float13"), "dtype is 'float13', expected one of bfloat16"),
    "bad text_config": (config(text_config={"hidden_size": 0}), r"text_config\.hidden_size is 0"),
    "unknown dtype in numbers": (config(torch_dtype=16), "torch_dtype is 16, expected one of bfloat16"),
    "architectures of numbers": (config(architectures=[5]), r"architectures is \[5\], expected a list of names"),
    "text_config is a list": (config(text_config=[1]), r"text_config is \[1\], expected an object"),
    "rotary embedding in one word": (config(rope_scaling="linear"), "rope_scaling is 'linear', expected an object"),
    "rotary embedding is a list": (config(rope_parameters=[1]), r"rope_parameters is \[1\], expected an object"),
    "stretched by nothing": (
        config(rope_scaling={"rope_type": "linear", "factor": 0}), r"rope_scaling\.factor is 0, expected a number",
    ),
    "theta is a text": (config(rope_theta="big"), "rope_theta is 'big', expected a number above 0"),
    "theta is a text, newer": (config(rope_parameters={"rope_theta": "x"}), r"rope_parameters\.rope_theta is 'x'"),
    "epsilon below 0": (config(rms_norm_eps=-1), "rms_norm_eps is -1, expected a number above 0"),
    "tied in quotes": (config(tie_word_embeddings="false"), "tie_word_embeddings is 'false', expected true or false"),
    "more layers than tensors": (
        config(num_hidden_layers=1000), "num_hidden_layers 1000, but its files hold only 3 tensors",
    ),
    "all zero": (
        weights(lambda found: {name: 0 * value for name, value in found.items()}), "all weights in .* are zero",
    ),
    "integers": (
        weights(lambda found: {**found, LAYER: found[LAYER].astype(np.int8)}),
        r"holds 1 weights that are no plain floating-point numbers \(model\.layers.*as I8\)",
    ),
    "untied head under a tied config": (
        config(tie_word_embeddings=True), r"`tie_word_embeddings: true`, but lm_head\.weight is not model\.embed",
    ),
    "tokens beyond": (
        text("tokenizer.json", json.dumps(tokenizer(12))),
        "has 2 tokens beyond the model's vocabulary of 10 .*'t10' is 10",
    ),
    "end token beyond": (
        text("tokenizer.json", json.dumps(tokenizer(2, {"t2": 11}))), "has 1 tokens beyond .*'t2' is 11",
    ),
    "tokenizer is UTF-16": (text("tokenizer.json", "{}".encode("utf-16")), r"tokenizer\.json cannot be read"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_is_refused_with_a_sentence_that_names_what_is_wrong(folder: Path, case: str) -> None:
    change, message = REFUSED[case]
    check_model_folder(ModelFacts(folder))
    change(folder)
    with pytest.raises(ModelError, match=message) as refused:
        check_model_folder(ModelFacts(folder))
    assert str(folder) in str(refused.value)


SOUND: dict[str, Change] = {
    "shards": sharded(),
    "a tied head that is the embedding": lambda folder: (
        [
            change(folder)
            for change in (config(tie_word_embeddings=True), weights(lambda found: {**found, HEAD: found[EMBEDDING]}))
        ]
        and None
    ),
    "no padding, as old Llama models say it": config(pad_token_id=-1),
    "defaults that are null": config(num_key_value_heads=None, head_dim=None, eos_token_id=None),
    "no experts, as Granite's dense hybrids say it": config(num_local_experts=0),
    "a width for each layer": config(intermediate_size=[16, 24]),
    "masks and counters": weights(lambda found: {**found, "attn.bias": np.ones((1, 1, 4, 4), np.uint8)}),
    "quantized": lambda folder: (
        [
            change(folder)
            for change in (
                config(quantization_config={"quant_method": "compressed-tensors"}),
                weights(lambda found: {**found, LAYER: found[LAYER].astype(np.int8)}),
            )
        ]
        and None
    ),
}


@pytest.mark.parametrize("case", SOUND)
def test_what_is_sound_has_nothing_unusual(folder: Path, case: str) -> None:
    SOUND[case](folder)
    assert check_model_folder(ModelFacts(folder)) == []


def test_what_is_only_unusual_is_said(folder: Path) -> None:
    weights(lambda found: {**found, LAYER: 0 * found[LAYER]})(folder)
    text("tokenizer.json", json.dumps(tokenizer(10, {"<image>": 10})))(folder)
    zeros, tokens = check_model_folder(ModelFacts(folder))
    assert "1 of 3 matrices hold zeros only (model.layers.0.mlp.up_proj.weight)" in zeros
    assert "1 added tokens beyond the model's vocabulary of 10 ('<image>' is 10)" in tokens


@pytest.mark.parametrize("model_type", ["qwen3", "mistral", "gpt2"])
def test_a_class_of_another_type_is_said_since_training_and_serving_go_by_one_each(
    folder: Path, model_type: str
) -> None:
    config(model_type=model_type)(folder)
    (said,) = check_model_folder(ModelFacts(folder))
    assert f"model_type is {model_type}, but architectures is LlamaForCausalLM" in said


def test_classes_are_named_after_their_type_in_transformers_itself() -> None:
    """Transformers names model classes after their types, as our check assumes, but for parts and shared classes."""
    named = {
        (model_type, name)
        for names in (MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES)
        for model_type, name in names.items()
    }
    others = {
        model_type
        for model_type, name in named
        if other_architecture({"model_type": model_type, "architectures": [name]})
    }
    assert others <= {
        "cohere_compass_text", "gpt-sw3", "hunyuan_v1_dense", "hunyuan_v1_moe", "minimax_m3_vl_text",
        "exaone", "internlm3", "iquestcoder", "sarvam_mla", "sarvam_moe",  # from 5.24 on, in another family's classes
    }  # fmt: skip


@pytest.mark.parametrize("part", [{}, {"text_config": {}}], ids=["model", "its text part"])
def test_a_quantized_model_is_refused_where_weights_are_learned(folder: Path, part: dict[str, Any]) -> None:
    quantized = {"quantization_config": {"quant_method": "gptq"}}
    config(**({"text_config": quantized} if part else quantized))(folder)
    with pytest.raises(ModelError, match=r"quantized already \(gptq\); take the model that it was made from"):
        check_unquantized(ModelFacts(folder), str(folder))
