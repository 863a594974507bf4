"""A plan reports for all stages at once which of their settings a local model does not support."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from flows.ledger import machine
from flows.planning.input_check import check_models
from flows.planning.outside import resolve_outside
from flows.recipe.recipe import Recipe
from flows.store.store import Store
from stages.core.errors import RecipeError

MakeRecipe = Callable[..., Recipe]
LLAMA = {
    "model_type": "llama",
    "num_hidden_layers": 2,
    "hidden_size": 8,
    "intermediate_size": 16,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "vocab_size": 16,
    "max_position_embeddings": 512,
}
MEGATRON = {"engine": "megatron", "data": {"dataset": "problems", "sequence_length": 512}}


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(LLAMA))
    (folder / "tokenizer.json").write_text("{}")
    weights = {name: np.ones((16, 8), np.float32) for name in ("model.embed_tokens.weight", "lm_head.weight")}
    save_file(weights, folder / "model.safetensors")
    return folder


def check(recipe: Recipe, store: Store) -> list[str]:
    outside = resolve_outside(recipe, [name for name in recipe.stages if name != "awq"])
    return check_models(recipe, outside, store.index())


def of_folder(recipe: MakeRecipe, model: Path, **sft: Any) -> Recipe:
    return recipe(base={"model": f"file://{model}"}, sft=sft)


def test_code_of_the_model_that_will_not_be_run_is_said(recipe: MakeRecipe, model: Path, store: Store) -> None:
    (model / "config.json").write_text(json.dumps({**LLAMA, "auto_map": {"AutoModelForCausalLM": "mine.Model"}}))
    (note,) = [note for note in check(of_folder(recipe, model), store) if "auto_map" in note]
    assert note.startswith("sft: ") and "are not run" in note
    assert not any("auto_map" in note for note in check(of_folder(recipe, model, trust_remote_code=True), store))


@pytest.mark.parametrize(
    ("layout", "message"),
    [
        ({"tp": 3}, r"stages\.sft\.layout: .*tp 3 does not divide the model's 4 attention heads"),
        ({"pp": 100}, r"stages\.sft\.layout: .*100 chunks of layers, but the model has only 2 layers"),
        ({"dp_shard": 2, "ep": 2}, r"stages\.sft\.layout: .*spread experts, but llama has none"),
    ],
)
def test_a_layout_that_the_model_does_not_allow(
    recipe: MakeRecipe, store: Store, model: Path, layout: dict[str, int], message: str
) -> None:
    with pytest.raises(RecipeError, match=message):
        check(of_folder(recipe, model, **MEGATRON, layout=layout), store)


def test_a_layout_that_needs_transformer_engine_is_refused_where_there_are_gpus_and_it_is_missing(
    recipe: MakeRecipe, store: Store, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = of_folder(recipe, model, **MEGATRON, layout={"cp": 2})
    check(wanted, store)
    (tmp_path / "gpus" / "0000:01:00.0").mkdir(parents=True)
    (tmp_path / "gpus" / "0000:01:00.0" / "information").write_text("Model: NVIDIA H100 80GB HBM3\n")
    monkeypatch.setattr(machine, "GPUS", tmp_path / "gpus")
    with pytest.raises(RecipeError, match=r"stages\.sft\.layout: .*cp 2 on GPUs needs Transformer Engine"):
        check(wanted, store)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    check(wanted, store)


def test_a_builtin_model_is_known_before_it_is_made(recipe: MakeRecipe, store: Store) -> None:
    with pytest.raises(RecipeError, match=r"stages\.sft\.layout: .*pp 100"):
        check(recipe(sft={**MEGATRON, "layout": {"pp": 100}}), store)


def test_a_sequence_beyond_the_models_positions_is_said(recipe: MakeRecipe, store: Store, model: Path) -> None:
    assert check(of_folder(recipe, model, data={"dataset": "problems", "sequence_length": 512}), store) == []
    (note,) = check(of_folder(recipe, model, data={"dataset": "problems", "sequence_length": 513}), store)
    assert note.startswith("sft: data.sequence_length 513 is beyond the 512 positions of file://")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_hidden_layers": -1}, r"stages\.sft\.model: .*num_hidden_layers is -1"),
        ({"quantization_config": {"quant_method": "awq"}}, r"stages\.sft\.model: .*quantized already \(awq\)"),
        (
            {"rope_scaling": {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": "x"}},
            r"stages\.sft\.model: .*original_max_position_embeddings is 'x', expected a number above 0",
        ),
        ({"vocab_size": 10**400}, r"stages\.sft\.model: .*vocab_size is 1000.*, expected a positive whole number"),
        ({"pad_token_id": 16}, r"stages\.sft\.model: .*pad_token_id 16 is beyond"),
    ],
)
def test_a_model_that_cannot_be_trained(
    recipe: MakeRecipe, store: Store, model: Path, changes: dict[str, Any], message: str
) -> None:
    (model / "config.json").write_text(json.dumps({**LLAMA, **changes}))
    with pytest.raises(RecipeError, match=message):
        check(of_folder(recipe, model), store)


def test_a_config_that_is_not_utf_8(recipe: MakeRecipe, store: Store, model: Path) -> None:
    (model / "config.json").write_bytes(json.dumps(LLAMA).encode("utf-16"))
    with pytest.raises(RecipeError, match=r"stages\.sft\.model: config\.json of file://.* is not UTF-8 text"):
        check(of_folder(recipe, model), store)


def test_damaged_files_of_a_local_model(recipe: MakeRecipe, store: Store, model: Path) -> None:
    (model / "model.safetensors").write_bytes(b"cut off")
    with pytest.raises(RecipeError, match=r"stages\.sft\.model: .*damaged or incomplete"):
        check(of_folder(recipe, model), store)


def test_a_source_that_did_not_answer_is_left_to_its_download(recipe: MakeRecipe, store: Store) -> None:
    unanswered = recipe(base={"model": "hf://org/name"})
    assert check_models(unanswered, {"base": {}, "problems": {}, "sft": {}}, store.index()) == []


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"\xff\xfe\0", "is not UTF-8 text"),
        (b" \n", "is empty"),
        (b"x" * (1 << 21), "is longer than 1,048,576 bytes"),
        (b"{% for message in messages %}", "is not a Jinja template: .* in line 1"),
        (b"{{" + b"(" * 100_000, "is not a Jinja template|nested too deeply"),
        (None, "there is no chat template"),
    ],
    ids=["binary", "empty", "long", "no Jinja", "nested", "a folder"],
)
def test_a_chat_template_that_is_none(
    recipe: MakeRecipe, store: Store, tmp_path: Path, content: bytes | None, message: str
) -> None:
    path = tmp_path / "own.jinja"
    if content is None:
        path.mkdir()
    else:
        path.write_bytes(content)
    with pytest.raises(RecipeError, match=rf"stages\.sft\.data\.chat_template: .*({message})"):
        check(recipe(sft={"data": {"dataset": "problems", "chat_template": str(path)}}), store)
