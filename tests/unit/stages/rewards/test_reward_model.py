"""The reward model's scores equal those of Transformers for prompt and answer."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer, Qwen3Config, Qwen3ForSequenceClassification

from stages.core.errors import DataError, ModelError
from stages.data.messages import Conversation, PlainText
from stages.rewards import scoring
from stages.rewards.judging import judging
from stages.rewards.reward import Completion, RewardContext
from stages.rewards.reward_model import RewardModelReward
from tests.serving import make_model

ANSWERS = ("3", "It is three, of course.", "", "four " * 20, "3")


@pytest.fixture(scope="module")
def artifact(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Provide a random reward model, and a tokenizer with one token for each character."""
    root = tmp_path_factory.mktemp("critic")
    folder = root / "reward_model"
    make_model(folder)
    for weights in folder.glob("*.safetensors"):
        weights.unlink()
    torch.manual_seed(0)
    config = Qwen3Config.from_pretrained(folder, num_labels=1, pad_token_id=0)
    Qwen3ForSequenceClassification(config).save_pretrained(folder)
    return root


def completion(text: str, document: Any) -> Completion:
    """Return a completion prompted with another model's special tokens; the reward model must use its own."""
    return Completion("<|other|>What is 1 + 2?<|model|>", text, 1, None, {}, document)


def scores(root: Path, completions: list[Completion]) -> list[float]:
    context = RewardContext({"critic": root}, Path("/nowhere"), lambda message: None)
    rewards = {"liked": RewardModelReward(type="reward_model", model="critic")}
    with judging(rewards, context) as judge:
        return [one.total for one in judge([(f"completion {place}", one) for place, one in enumerate(completions)])]


@pytest.mark.parametrize("batch_tokens", [8192, 64])
@pytest.mark.parametrize("as_chat", [True, False])
def test_scores_are_those_of_transformers(
    artifact: Path, as_chat: bool, batch_tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scoring, "BATCH_TOKENS", batch_tokens)
    asked = [{"role": "user", "content": "What is 1 + 2?"}]
    document = Conversation(asked) if as_chat else PlainText("1 + 2 =", "")
    found = scores(artifact, [completion(text, document) for text in ANSWERS])
    folder = artifact / "reward_model"
    model, tokenizer = AutoModelForSequenceClassification.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    for text, score in zip(ANSWERS, found, strict=True):
        answered = [*asked, {"role": "assistant", "content": text}]
        rendered = tokenizer.apply_chat_template(answered, tokenize=False) if as_chat else f"1 + 2 ={text}<eos>"
        with torch.no_grad():
            expected = model(**tokenizer(rendered, return_tensors="pt", add_special_tokens=False)).logits.item()
        assert score == pytest.approx(expected, abs=1e-5)
    assert max(found) - min(found) > 0.1, "or anything would equal anything"


def test_a_completion_that_the_model_cannot_read_is_named(artifact: Path) -> None:
    document = Conversation([{"role": "user", "content": "What is 1 + 2?"}])
    with pytest.raises(DataError, match=r"completion 1: the reward liked: has \d+ tokens; the reward model reads 256"):
        scores(artifact, [completion("3", document), completion("3" * 300, document)])


def test_a_model_without_one_number_an_answer_is_refused(tmp_path: Path) -> None:
    make_model(tmp_path / "reward_model")
    with pytest.raises(ModelError, match="is Qwen3ForCausalLM with 2 labels; expected a sequence classification"):
        scores(tmp_path, [])
    config = json.loads((tmp_path / "reward_model" / "config.json").read_text())
    config |= {"architectures": ["Qwen3ForSequenceClassification"], "id2label": {"0": "bad", "1": "good", "2": "fine"}}
    (tmp_path / "reward_model" / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match="with 3 labels; expected"):
        scores(tmp_path, [])


def test_conversations_for_a_model_without_a_template_are_refused(artifact: Path, tmp_path: Path) -> None:
    folder = tmp_path / "reward_model"
    folder.mkdir()
    for path in (artifact / "reward_model").iterdir():
        if path.name != "chat_template.jinja":
            (folder / path.name).symlink_to(path)
    with pytest.raises(DataError, match=r"completion 0: the reward liked: .*chat template"):
        scores(tmp_path, [completion("3", Conversation([{"role": "user", "content": "What is 1 + 2?"}]))])


def test_what_is_still_to_be_trained_is_no_error_of_the_recipe(tmp_path: Path) -> None:
    context = RewardContext({"critic": tmp_path}, tmp_path, lambda message: None)
    with RewardModelReward(type="reward_model", model="critic").opened("liked", context):
        pass
