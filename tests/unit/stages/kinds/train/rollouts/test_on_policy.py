"""On-policy distillation decides by the seed which training steps sample from the model, and with what requests."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import AutoTokenizer

from stages.core.contract import StageInput
from stages.core.errors import DataError
from stages.data.look import NullReporter
from stages.data.prepare import prepare
from stages.kinds.train.check import check
from stages.kinds.train.rollouts.on_policy import RowPrompt, _prompt_length, asked_of, is_on_policy, prompts_of
from stages.models.facts import ModelFacts
from tests.train_stage import make_artifacts, make_config

CHAT = [
    {"role": "user", "content": "What is 1 + 2?"},
    {"role": "assistant", "content": "3"},
    {"role": "user", "content": "And 2 + 2?"},
    {"role": "assistant", "content": "4"},
]


@pytest.fixture(scope="module")
def artifacts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return make_artifacts(tmp_path_factory.mktemp("artifacts"))


def problems(artifacts: dict[str, Path], folder: Path, row: dict[str, Any]) -> list[tuple[str, str]]:
    """Return the problems that the check before training finds for on-policy distillation on copies of one row."""
    (folder / "texts" / "data").mkdir(parents=True)
    (folder / "texts" / "data" / "train.jsonl").write_text(f"{json.dumps(row)}\n" * 8)
    distill = {"lmbda": 0.5, "loss_top_k": 4, "sampling": {"max_completion_length": 8}}
    config = make_config("distill", data={"dataset": "texts", "sequence_length": 128}, teacher="base", distill=distill)
    stage_input = StageInput(
        name="small",
        kind="train",
        version="0",
        config=config.model_dump(mode="json"),
        inputs={**artifacts, "texts": folder / "texts"},
        cache=folder / "cache",
    )
    return [(field, str(error)) for field, error in check(stage_input)]


def test_the_share_of_steps_is_that_of_draws_of_their_own() -> None:
    drawn = [is_on_policy(0, step, 0.25) for step in range(1, 2001)]
    assert np.mean(drawn) == pytest.approx(0.25, abs=0.05)
    assert drawn == [is_on_policy(0, step, 0.25) for step in range(1, 2001)], "as a resumed run has them"
    assert drawn != [is_on_policy(1, step, 0.25) for step in range(1, 2001)]
    assert all(is_on_policy(0, step, 1.0) for step in range(1, 100))


def test_a_run_that_goes_on_asks_the_same_again() -> None:
    """A resumed training samples with the same requests, which depend on the recipe and the training step alone."""
    prompts = [RowPrompt(ids) for ids in ([1, 2, 3], [4], [1, 2, 3])]
    asked = asked_of(prompts, 8, 6, seed=0, step=3)
    assert [one.prompt for one in asked] == [one.tokens for one in prompts]
    assert [one.max_tokens for one in asked] == [5, 6, 5], "what the prompt leaves, at most as many as are asked for"
    assert asked == asked_of(prompts, 8, 6, seed=0, step=3)
    seeds = [one.seed for seed, step in ((0, 3), (0, 4), (1, 3)) for one in asked_of(prompts, 8, 6, seed, step)]
    assert len(set(seeds)) == len(seeds) == 9
    with pytest.raises(DataError, match="step 3: a prompt of 8 tokens leaves no room for an answer in the 8"):
        asked_of([RowPrompt([1] * 8)], 8, 6, seed=0, step=3)


def test_texts_without_prompts_are_named_before_training(artifacts: dict[str, Path], tmp_path: Path) -> None:
    ((field, problem),) = problems(artifacts, tmp_path, {"text": "1 + 2 = 3"})
    assert field == "data.dataset"
    assert "the rows have no prompts that the model could answer (`lmbda`)" in problem


def test_the_prompt_is_all_before_the_last_answer(artifacts: dict[str, Path], tmp_path: Path) -> None:
    """Prompts are all before the last answer of a row's documents; tokens without loss may follow the answer."""
    texts = tmp_path / "data"
    texts.mkdir()
    (texts / "train.jsonl").write_text(f"{json.dumps({'messages': CHAT})}\n" * 3)
    base = artifacts["base"] / "model"
    data = make_config(data={"dataset": "texts", "sequence_length": 256}).data
    dataset = prepare(
        texts,
        data,
        ModelFacts(base),
        rows="examples",
        cache=tmp_path,
        report=NullReporter(),
        bad_rows_file=tmp_path / "bad",
    ).training
    assert len(dataset) == 1
    tokenizer = AutoTokenizer.from_pretrained(base)
    expected = tokenizer.apply_chat_template(CHAT[:-1], add_generation_prompt=True, tokenize=False)
    assert [tokenizer.decode(one.tokens) for one in prompts_of(dataset, [0])] == [expected] * 3


@pytest.mark.parametrize(
    ("loss", "length"), [("0110010", 5), ("0110", 1), ("1110", 1), ("0001", 3), ("01", 1), ("00110100", 5)]
)
def test_the_last_run_of_learned_tokens_is_the_answer(loss: str, length: int) -> None:
    assert _prompt_length(np.array([one == "1" for one in loss])) == length


def test_conversations_have_prompts(artifacts: dict[str, Path], tmp_path: Path) -> None:
    assert problems(artifacts, tmp_path, {"messages": CHAT}) == []
