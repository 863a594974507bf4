"""Tokenizers that lose text are refused with the reason; each test changes a valid tokenizer in one way."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from stages.core.errors import ModelError
from stages.hubs.builtin.qwen3 import make_tokenizer
from stages.models.facts import ModelFacts
from stages.models.loading import check_tokenizer

Content = dict[str, Any]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    make_tokenizer().save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text('{"vocab_size": 288}')
    return tmp_path


def change(folder: Path, name: str, fields: Callable[[Content], Content]) -> None:
    path = folder / name
    path.write_text(json.dumps(fields(json.loads(path.read_text()))))


def drops(content: Content) -> Content:
    return {**content, "normalizer": {"type": "Replace", "pattern": {"Regex": ".*"}, "content": ""}}


def cuts(content: Content) -> Content:
    pattern = {"Regex": "^(.{60}).*"}
    return {**content, "normalizer": {"type": "Replace", "pattern": pattern, "content": "short"}}


@pytest.mark.parametrize(("damage", "message"), [(drops, "makes no tokens of"), (cuts, "cuts texts: 50 times")])
def test_a_tokenizer_that_loses_texts(folder: Path, damage: Callable[[Content], Content], message: str) -> None:
    assert list(check_tokenizer(ModelFacts(folder))) == []
    change(folder, "tokenizer.json", damage)
    with pytest.raises(ModelError, match=message):
        list(check_tokenizer(ModelFacts(folder)))


def test_tokens_that_the_model_lacks(folder: Path) -> None:
    (folder / "config.json").write_text('{"vocab_size": 16}')
    with pytest.raises(ModelError, match="beyond the model's vocabulary of 16"):
        list(check_tokenizer(ModelFacts(folder)))


def test_a_damaged_one(folder: Path) -> None:
    change(folder, "tokenizer.json", lambda content: {**content, "model": {"type": "no such thing"}})
    with pytest.raises(ModelError, match="cannot be loaded"):
        list(check_tokenizer(ModelFacts(folder)))


def test_one_without_an_end_of_text_token_is_said(folder: Path) -> None:
    change(folder, "tokenizer_config.json", lambda content: {**content, "eos_token": None})
    (note,) = check_tokenizer(ModelFacts(folder))
    assert "no end-of-text token (`eos_token`)" in note


def test_an_end_of_text_token_that_the_model_lacks(folder: Path) -> None:
    change(folder, "tokenizer_config.json", lambda content: {**content, "eos_token": "<not there>"})
    with pytest.raises(
        ModelError, match="ends texts with token 288 \\('<not there>'\\), beyond the model's vocabulary"
    ):
        list(check_tokenizer(ModelFacts(folder)))


def test_one_that_loses_digits_is_said(folder: Path) -> None:
    no_digits = {"type": "Replace", "pattern": {"Regex": "[0-9]"}, "content": ""}
    change(folder, "tokenizer.json", lambda content: {**content, "normalizer": no_digits})
    (note,) = check_tokenizer(ModelFacts(folder))
    assert (
        "loses parts of texts: 'The sum of 27 and 15 is 42, she said. ' reads 'The sum of  and  is , she said. '"
        in note
    )


def test_one_that_knows_small_letters_only_is_fine(folder: Path) -> None:
    change(folder, "tokenizer.json", lambda content: {**content, "normalizer": {"type": "Lowercase"}})
    assert list(check_tokenizer(ModelFacts(folder))) == []
