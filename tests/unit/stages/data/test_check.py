"""The check before training finds bad rows in a stage's dataset within seconds, even if the dataset is large."""

import gzip
import json
import random

import pyarrow
import pytest

from stages.data import look
from stages.data.config import DataConfig
from stages.data.look import data_problems
from stages.models.facts import ModelFacts
from tests.unit.stages.data.conftest import CHATML

CHATS = [
    {"messages": [{"role": "user", "content": f"{number}?"}, {"role": "assistant", "content": f"{number}!"}]}
    for number in range(1500)
]


def zstd(content: bytes) -> bytes:
    return pyarrow.compress(content, codec="zstd", asbytes=True)


@pytest.fixture
def problems(tmp_path, tokenizer_folder):
    """Provide a function that checks a dataset folder, and returns config field and message of each problem."""

    def find(folder, tokenizer=tokenizer_folder, **options):
        config = DataConfig(dataset="data", **{"sequence_length": 256, **options})
        found = data_problems(folder, config, ModelFacts(tokenizer), rows="examples", cache=tmp_path / "cache")
        return [(field, str(error)) for field, error in found]

    return find


def test_good_data_have_no_problems_and_are_prepared(problems, write_rows, tmp_path):
    assert problems(write_rows(CHATS), evaluation_fraction=0.1) == []
    assert len([*(tmp_path / "cache" / "tokenized").glob("*/about.json")]) == 2


def test_every_missing_split_is_named(problems, write_rows):
    fields = [field for field, _ in problems(write_rows(CHATS), split="a", evaluation_split="b")]
    assert fields == ["split", "evaluation_split"]


def test_a_template_that_is_none_is_named_by_its_field(problems, write_rows, tmp_path):
    (tmp_path / "broken.jinja").write_text("{% for")
    ((field, message),) = problems(write_rows(CHATS), chat_template=tmp_path / "broken.jinja")
    assert field == "chat_template"
    assert "is not a Jinja template" in message


def test_rows_that_do_not_fit_are_found_before_training(problems, write_rows):
    long = {"messages": [CHATS[0]["messages"][0], {"role": "assistant", "content": "x" * 300}]}
    ((field, message),) = problems(write_rows([*CHATS[:3], long]))
    assert field == "dataset"
    assert "1 of 4 rows have more than sequence_length 256 tokens" in message


def test_both_portions_are_looked_at(problems, write_rows):
    write_rows([{"messages": []}], "test.jsonl")
    found = problems(write_rows([*CHATS[:3], "text"]), evaluation_split="test")
    assert [message.split(" rows")[0] for _, message in found] == ["training", "evaluation"]


def test_held_out_rows_that_are_learned_are_found(problems, write_rows):
    write_rows(CHATS[:3], "test.jsonl")
    ((field, message),) = problems(write_rows(CHATS), evaluation_split="test")
    assert field == "evaluation_split"
    assert "3 of 3 held-out rows are among the training rows too" in message


@pytest.mark.parametrize("limit", ["CHECK_SECONDS", "LARGE_BYTES"])
def test_of_data_that_take_too_long_the_first_rows_are_judged(problems, write_rows, monkeypatch, tmp_path, limit):
    monkeypatch.setattr(look, "CHECK_SECONDS", -1.0)
    if limit == "LARGE_BYTES":
        monkeypatch.setattr(look, "LARGE_BYTES", 0)
    folder = write_rows(CHATS)
    unseen = [("dataset", "training rows after train.jsonl:1 were not looked at: there are -1 s for them")]
    assert problems(folder) == unseen
    assert not [*tmp_path.glob("cache/tokenized/*/about.json")]
    path = folder / "train.jsonl"
    lines = path.read_text().splitlines()
    path.write_text("\n".join(['{"messages": []}', *lines]))
    ((field, message),) = problems(folder)
    assert (field, "train.jsonl:1 has an empty list" in message) == ("dataset", True)
    path.write_text("\n".join([*lines, '{"messages": []}']))
    assert json.loads(path.read_text().splitlines()[-1]) == {"messages": []}
    assert problems(folder) == unseen


def test_rows_that_the_recipe_drops_are_not_judged_by_the_first_of_them(problems, write_rows, monkeypatch):
    monkeypatch.setattr(look, "CHECK_SECONDS", -1.0)
    [(field, message)] = problems(write_rows([{"messages": []}, *CHATS]), on_bad_rows="drop")
    assert (field, message.split(":")[0]) == ("dataset", "training rows after train.jsonl")


@pytest.mark.parametrize(("suffix", "compress"), [("gz", gzip.compress), ("zst", zstd)])
def test_of_a_compressed_file_no_more_is_read_than_there_is_time_for(problems, tmp_path, monkeypatch, suffix, compress):
    monkeypatch.setattr(look, "CHECK_SECONDS", -1.0)
    rows = [{"text": random.randbytes(500).hex()} for _ in range(5000)]
    packed = compress("".join(json.dumps(row) + "\n" for row in rows).encode())
    path = tmp_path / "data" / f"train.jsonl.{suffix}"
    path.parent.mkdir()
    path.write_bytes(packed[: len(packed) // 2])  # to read on to where it ends would be an error
    unseen = f"training rows after {path.name}:1 were not looked at: there are -1 s for them"
    assert problems(path.parent, sequence_length=4096) == [("dataset", unseen)]


def test_the_time_of_the_process_that_renders_counts(problems, write_rows, monkeypatch, tmp_path):
    """A data check's time limit includes rendering in another process, which takes these rows most of the time."""
    monkeypatch.setattr(look, "CHECK_SECONDS", 0.4)
    slow = tmp_path / "slow.jinja"
    slow.write_text("{% for _ in range(99999) %}{% endfor %}" + CHATML)
    ((field, message),) = problems(write_rows(CHATS), chat_template=slow)
    assert (field, message.endswith("were not looked at: there are 0.4 s for them")) == ("dataset", True)
