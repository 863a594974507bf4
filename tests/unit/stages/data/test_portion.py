"""Held-out rows are a fixed share of all, equal in every run, and never trained on."""

from stages.data.config import DataConfig
from stages.data.files import BadRow, Row, RowLocation, portions

ROWS = [Row(RowLocation("train.jsonl", number), {"text": f"row {number % 900}"}) for number in range(1000)]


def numbers(rows):
    return {row.place.number for row in rows}


def test_a_fraction_splits_the_rows_in_two_that_share_no_content():
    training, evaluation = portions(DataConfig(dataset="x", evaluation_fraction=0.1))
    trained, held_out = list(training.select(ROWS)), list(evaluation.select(ROWS))
    assert numbers(trained) | numbers(held_out) == numbers(ROWS)
    assert not {row.content["text"] for row in trained} & {row.content["text"] for row in held_out}
    assert 60 < len(held_out) < 140


def test_neither_order_nor_other_rows_change_what_is_held_out():
    _, evaluation = portions(DataConfig(dataset="x", evaluation_fraction=0.1))
    held_out = numbers(evaluation.select(ROWS))
    assert numbers(evaluation.select(reversed(ROWS[:500]))) == {number for number in held_out if number < 500}


def test_unreadable_rows_are_judged_with_the_training_rows():
    training, evaluation = portions(DataConfig(dataset="x", evaluation_fraction=0.5))
    bad = [BadRow(RowLocation("train.jsonl", 1), "is not valid JSON")]
    assert (list(training.select(bad)), list(evaluation.select(bad))) == (bad, [])


def test_a_named_split_wins_over_the_fraction_and_none_means_no_evaluation():
    training, evaluation = portions(DataConfig(dataset="x", evaluation_split="test", evaluation_fraction=0.5))
    assert (training.split, evaluation.split) == ("train", "test")
    assert list(training.select(ROWS)) == ROWS
    assert len(portions(DataConfig(dataset="x"))) == 1
