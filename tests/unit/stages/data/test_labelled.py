"""Rows of {prompt, completion, label} become documents for KTO, paired with answers to other prompts."""

import json

import pytest
import torch

from stages.core.errors import DataError
from stages.data.batch import IGNORED
from stages.data.config import DataConfig
from stages.data.prepare import prepare
from stages.models.facts import ModelFacts

ROWS = [{"prompt": f"q{number} ", "completion": f"answer{number}", "label": number % 3 > 0} for number in range(30)]


class Silent:
    def progress(self, *_):
        pass

    def warn(self, _):
        pass


@pytest.fixture
def run(tmp_path, tokenizer_folder):
    def prepare_rows(text, name="train.jsonl", **options):
        folder = tmp_path / "data"
        folder.mkdir()
        (folder / name).write_text(text)
        config = DataConfig(dataset="data", **{"sequence_length": 64, **options})
        paths = {"cache": tmp_path / "cache", "bad_rows_file": tmp_path / "bad_rows.jsonl"}
        return prepare(folder, config, ModelFacts(tokenizer_folder), rows="labelled", report=Silent(), **paths).training

    return prepare_rows


def lines(rows):
    return "\n".join(map(json.dumps, rows))


def texts(batch, read_ids):
    """Return the text of each document in a batch, and the part of it that has a loss."""
    found = []
    for number in range(batch.documents.count):
        mine = batch.documents.ids == number
        targets = batch.signal.targets[mine]
        found.append((read_ids(batch.inputs.input_ids[mine].tolist()), read_ids(targets[targets != IGNORED].tolist())))
    return found


@pytest.mark.parametrize("packing", [True, False])
def test_every_document_has_its_label(run, read_ids, packing):
    dataset = run(lines(ROWS), packing=packing)
    batch = dataset.batch(range(len(dataset)))
    found = dict(zip(texts(batch, read_ids), batch.signal.is_good.tolist(), strict=True))
    assert found == {
        (f"{row['prompt']}{row['completion']}</s>", f"{row['completion']}</s>"): row["label"] for row in ROWS
    }
    assert dataset.about.num_good == 20


def test_answers_are_the_same_after_other_prompts(run, read_ids):
    dataset = run(lines(ROWS))
    for row in range(len(dataset)):
        own, other = (texts(make([row]), read_ids) for make in (dataset.batch, dataset.mismatched))
        assert [answer for _, answer in other] == [own[number - 1][1] for number in range(len(own))]
        for (text, _), (mixed, answer) in zip(own, other, strict=True):
            assert mixed == text.split(" ")[0] + " " + answer
    assert torch.equal(dataset.mismatched([0]).documents.ids[:, :1], dataset.batch([0]).documents.ids[:, :1])


def test_a_document_that_is_alone_gets_the_answer_of_the_row_before_as_far_as_it_fits(run, read_ids):
    rows = [
        {"prompt": "q" * 50 + " ", "completion": "short", "label": True},
        {"prompt": "p ", "completion": "a long answer that is not short at all", "label": False},
    ]
    dataset = run(lines(rows), packing=False)
    found = [text for row in (0, 1) for text, _ in texts(dataset.mismatched([row]), read_ids)]
    assert sorted(found) == ["p short</s>", "q" * 50 + " a long answer"]


@pytest.mark.parametrize("label", ["true", "True", "1", "1.0"])
def test_csv_says_labels_in_words(run, label):
    text = f"prompt,completion,label\nq ,good,{label}\nr ,bad,{'0.0' if '.' in label else 'false'}\n"
    assert run(text, "train.csv").batch([0]).signal.is_good.tolist() == [True, False]


@pytest.mark.parametrize("label", [True, False])
def test_answers_of_one_label_are_refused(run, label):
    with pytest.raises(DataError, match=rf"all 30 training rows have `label: {str(label).lower()}`.*`method: sft`"):
        run(lines([{**row, "label": label} for row in ROWS]))


@pytest.mark.parametrize("label", ["good", None, 0.5, 2, []])
def test_a_label_that_is_none_is_a_bad_row(run, label):
    with pytest.raises(DataError, match="as `label`; expected true, for a good answer, or false"):
        run(lines([*ROWS, {**ROWS[0], "label": label}]))
