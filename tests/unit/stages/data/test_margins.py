"""The `margin` of a preference row reaches the batch with its pair; methods that ignore margins report that."""

import json

import pytest

from stages.core.contract import StageContext
from stages.core.errors import DataError
from stages.data.batch import IGNORED
from stages.kinds.train.check_model import InputModels
from stages.kinds.train.config import TrainConfig
from stages.kinds.train.rows import RowData
from stages.models.facts import ModelFacts

ROWS = [
    {"prompt": f"q{number} ", "chosen": f"good{number}", "rejected": f"bad{number}", "margin": number / 4 - 1}
    for number in range(20)
]


@pytest.fixture
def read(tmp_path, tokenizer_folder):
    """Provide a function that prepares a file of rows as a train stage does."""

    def read_rows(text, name="train.jsonl", method="reward", **options):
        (tmp_path / "rows" / "data").mkdir(parents=True)
        (tmp_path / "rows" / "data" / name).write_text(text)
        fields = {"kind": "train", "method": method, "model": "base", "global_batch_size": 4, "learning_rate": 1e-3}
        data = {"dataset": "rows", "sequence_length": 64, **options}
        context = StageContext(tmp_path, "one", "0", {"rows": tmp_path / "rows"}, {}, tmp_path / "cache")
        models = InputModels(ModelFacts(tokenizer_folder))
        return RowData.read(TrainConfig.model_validate({**fields, "data": data}), context, models).prepared

    return read_rows


def lines(rows):
    return "\n".join(map(json.dumps, rows))


@pytest.mark.parametrize("packing", [True, False])
def test_every_pair_has_its_margin(read, read_ids, packing, capsys):
    dataset = read(lines(ROWS), packing=packing).training
    assert "margin" not in capsys.readouterr().out
    batch = dataset.batch(range(len(dataset)))
    found = {}
    for pair, margin in enumerate(batch.signal.margins.tolist()):
        targets = batch.signal.targets[batch.documents.ids == 2 * pair]
        found[read_ids(targets[targets != IGNORED].tolist())] = margin
    assert found == {f"{row['chosen']}</s>": row["margin"] for row in ROWS}


def test_numbers_in_text_are_read(read):
    dataset = read("prompt,chosen,rejected,margin\nq,yes,no,1.5\nr,no,yes,-2\n", "train.csv").training
    assert sorted(dataset.batch(range(len(dataset))).signal.margins.tolist()) == [-2, 1.5]


def test_rows_without_have_none(read):
    dataset = read(lines({**row, "margin": None} for row in ROWS)).training
    assert dataset.batch([0]).signal.margins is None


@pytest.mark.parametrize(
    ("margin", "message"),
    [
        ("large", "has 'large' as `margin`; expected a number"),
        (True, "has True as `margin`"),
        ("inf", "has 'inf' as `margin`"),
        (None, "has no `margin`, unlike the first row; expected it in all"),
    ],
)
def test_what_is_no_margin_is_a_bad_row(read, margin, message):
    with pytest.raises(DataError, match=message):
        read(lines([ROWS[0], {**ROWS[1], "margin": margin}]))


def test_a_method_without_use_for_it_says_so(read, capsys):
    read(lines(ROWS), method="dpo")
    assert "warning: the rows have a `margin`, which `method: dpo` does not use" in capsys.readouterr().out
