"""New tokens get a row of their own in every weight that has one a token, and the old tokens are as they were."""

import json

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoTokenizer

from stages.core.errors import ModelError, RecipeError
from stages.kinds.train.added_tokens import with_added_tokens
from stages.kinds.train.config import TrainConfig
from stages.models.facts import ModelFacts
from stages.models.loading import head_of, load_config, load_model
from stages.models.model_folder import check_model_folder
from tests.mtp_models import save_with_mtp
from tests.pipeline.test_quantize import save_model
from tests.zoo.models import tiny_model

TOKENS = ("<|call|>", "<|answer|>")
NUM_OLD = 32
"""Number of tokens of the tests' tokenizer; models that were given more rows than that are padded."""


def save(family, folder, num_rows, **fields):
    save_model(tiny_model(family, vocab_size=num_rows, **fields), folder)
    return ModelFacts(folder)


def logits(folder, tokens=(1, 5, 9, 2, 30)):
    model = load_model(folder, head=head_of(load_config(folder)), dtype=torch.float32)
    with torch.no_grad():
        return model(torch.tensor([tokens])).logits[0]


@pytest.mark.parametrize(("num_rows", "after"), [(32, 64), (33, 34), (64, 64)])
@pytest.mark.parametrize(("family", "tied"), [("qwen3", True), ("llama", False), ("gemma3_text", True)])
def test_logits_of_old_tokens_stay_and_those_of_new_ones_are_their_mean(tmp_path, family, tied, num_rows, after):
    start = save(family, tmp_path / "model", num_rows, tie_word_embeddings=tied)
    extended = with_added_tokens(start, TOKENS, tmp_path / "room", trust_remote_code=False)

    check_model_folder(extended)
    assert extended.vocabulary_size == after, "padded to the power of two that divided it before, 128 at most"
    before, now = logits(start.folder), logits(extended.folder)
    assert torch.equal(now[:, :NUM_OLD], before[:, :NUM_OLD])
    mean = before[:, :NUM_OLD].mean(1, keepdim=True).expand(-1, len(TOKENS))
    assert torch.allclose(now[:, NUM_OLD : NUM_OLD + len(TOKENS)], mean, atol=1e-5)


@pytest.mark.parametrize("family", ["qwen2_vl", "qwen3_5", "gemma4", "gemma3n_text"])
def test_models_that_see_and_tables_for_each_layer_grow_too(tmp_path, family):
    save_model(tiny_model(family), tmp_path / "model")  # with 64 rows
    tokens = [f"<|{number}|>" for number in range(40)]
    extended = with_added_tokens(ModelFacts(tmp_path / "model"), tokens, tmp_path / "room", trust_remote_code=False)

    before, now = logits(tmp_path / "model"), logits(extended.folder)
    assert torch.equal(now[:, :NUM_OLD], before[:, :NUM_OLD])
    assert logits(extended.folder, (1, NUM_OLD + 39, 2)).shape == (3, 128)


def test_a_smaller_table_for_each_layer_is_named(tmp_path):
    save_model(tiny_model("gemma3n_text", vocab_size_per_layer_input=48), tmp_path / "model")
    with pytest.raises(
        ModelError, match=r"vocab_size_per_layer_input is 48 .* vocab_size is 64: .* take another model"
    ):
        with_added_tokens(
            ModelFacts(tmp_path / "model"), TOKENS, tmp_path / "room", trust_remote_code=False, weights=False
        )


def test_the_tokenizer_reads_and_writes_them_and_says_the_rest_as_before(tmp_path):
    start = save("llama", tmp_path / "model", 32)
    extended = with_added_tokens(start, TOKENS, tmp_path / "room", trust_remote_code=False)
    old, new = (AutoTokenizer.from_pretrained(model.folder) for model in (start, extended))

    assert new("n1 <|call|> n7").input_ids == [1, NUM_OLD, 7]
    assert new.decode([NUM_OLD + 1, 7], skip_special_tokens=True).split() == ["<|answer|>", "n7"]
    assert new("n1 n30 n9").input_ids == old("n1 n30 n9").input_ids
    assert new.chat_template == old.chat_template
    assert (extended.folder / "generation_config.json").read_bytes() == (
        start.folder / "generation_config.json"
    ).read_bytes()


@pytest.mark.parametrize("family", ["deepseek_v3", "glm4_moe"])
def test_the_copies_of_mtp_layers_grow_with_the_embedding_and_the_head(tmp_path, family):
    mtp = save_with_mtp(family, tmp_path / "model", vocab_size=33)  # no other size of theirs
    extended = with_added_tokens(ModelFacts(tmp_path / "model"), TOKENS, tmp_path / "room", trust_remote_code=False)
    written = load_file(extended.folder / "model.safetensors")

    per_token = {name for name, weight in mtp.items() if name.endswith(("embed_tokens.weight", "head.weight"))}
    assert {written[name].shape[0] for name in per_token} == {34}
    assert all(torch.equal(written[name], weight) for name, weight in mtp.items() if name not in per_token)


def test_to_look_at_data_no_weights_are_written(tmp_path):
    start = save("llama", tmp_path / "model", 32)
    extended = with_added_tokens(start, TOKENS, tmp_path / "room", trust_remote_code=False, weights=False)
    assert extended.vocabulary_size == 64
    assert not [*extended.folder.glob("*.safetensors")]
    assert with_added_tokens(start, (), tmp_path / "room", trust_remote_code=False) is start


def test_a_token_that_the_model_has_is_refused(tmp_path):
    start = save("llama", tmp_path / "model", 32)
    with pytest.raises(RecipeError, match=r"data\.add_tokens: the tokenizer has 'n7' already"):
        with_added_tokens(start, ("<|call|>", "n7"), tmp_path / "room", trust_remote_code=False)
    assert not [*(tmp_path / "room").glob("model*")], "nothing half made is left"


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ({"adapter": {}}, "train all weights .remove `adapter`., or train the adapter on the model of such a stage"),
        ({"method": "dpo"}, "add them in a stage of `method: sft`, and train its model here"),
        ({"data": {"dataset": "rows", "add_tokens": ["<a>", "<a>"]}}, "names '?<a>'? twice; expected each token once"),
    ],
)
def test_who_cannot_learn_them_is_refused_when_the_recipe_is_read(fields, problem):
    config = {"kind": "train", "method": "sft", "model": "base", "global_batch_size": 1, "learning_rate": 1e-3}
    data = {"dataset": "rows", "add_tokens": list(TOKENS)}
    assert TrainConfig.model_validate({**config, "data": data}).identity()["data"]["add_tokens"] == list(TOKENS)
    assert "add_tokens" not in TrainConfig.model_validate({**config, "data": {"dataset": "rows"}}).identity()["data"]
    with pytest.raises(ValueError, match=problem):
        TrainConfig.model_validate(json.loads(json.dumps({**config, "data": data, **fields})))
