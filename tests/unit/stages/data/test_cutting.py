"""Texts are cut into rows as Transformers' pre-training example cuts them."""

from itertools import chain

import pytest
from pydantic import ValidationError
from transformers import AutoTokenizer

from stages.core.errors import DataError
from stages.data.batch import IGNORED
from stages.data.config import DataConfig
from stages.data.prepare import prepare
from stages.models.facts import ModelFacts

TEXTS = ["A short one.", "Ein längerer Text, der über mehrere Zeilen geht. " * 5, "€" * 30, "x"]
LENGTH = 16


class Silent:
    def progress(self, done, total, unit, message=""):
        pass

    def warn(self, message):
        pass


@pytest.fixture
def cut_rows(tmp_path, write_rows):
    def run(texts, tokenizer, **options):
        return prepare(
            write_rows([{"text": text} for text in texts]),
            DataConfig(dataset="data", format="text", packing="cut", **{"sequence_length": LENGTH, **options}),
            ModelFacts(tokenizer),
            rows="examples",
            cache=tmp_path / "cache",
            report=Silent(),
            bad_rows_file=tmp_path / "bad.jsonl",
        ).training

    return run


def group_texts(examples, block_size):
    """Cut token lists as Transformers' `run_clm.py` does: join them, drop the remainder, split."""
    joined = {name: list(chain(*examples[name])) for name in examples}
    total = len(joined["input_ids"]) // block_size * block_size
    return {name: [ids[at : at + block_size] for at in range(0, total, block_size)] for name, ids in joined.items()}


@pytest.mark.parametrize("begins_texts", [False, True])
def test_rows_are_those_of_group_texts(cut_rows, make_tokenizer, begins_texts):
    folder = make_tokenizer(begins_texts=begins_texts)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    ids = [tokenizer(text)["input_ids"] + [tokenizer.eos_token_id] for text in TEXTS]
    wanted = group_texts({"input_ids": ids}, LENGTH)["input_ids"]
    rows = cut_rows(TEXTS, folder)
    batch = rows.batch(range(len(rows)))
    assert batch.inputs.input_ids.tolist() == wanted
    assert batch.signal.targets.tolist() == [[*row[1:], IGNORED] for row in wanted]  # Transformers shifts within a row
    assert rows.padding_fraction == 0
    assert batch.documents.ids.tolist() == [
        [row] * LENGTH for row in range(len(wanted))
    ]  # attention over the whole row
    num_bytes, num_tokens = sum(len(text.encode()) for text in TEXTS), sum(map(len, ids))
    assert rows.about.bytes_per_token == pytest.approx(num_bytes / num_tokens)


def test_special_tokens_within_texts_have_the_bytes_that_people_wrote(cut_rows, tokenizer_folder):
    rows = cut_rows(["a <|im_end|> b"], tokenizer_folder, sequence_length=4)
    assert rows.about.bytes_per_token == pytest.approx(14 / 15)


def test_texts_that_fill_no_row_are_named(cut_rows, tokenizer_folder):
    with pytest.raises(DataError, match="all texts together have 4 tokens, less than `sequence_length`"):
        cut_rows(["abc"], tokenizer_folder)


def test_conversations_are_not_cut():
    with pytest.raises(ValidationError, match="`packing: cut` is for plain text, and `format` is auto"):
        DataConfig(dataset="data", packing="cut")
