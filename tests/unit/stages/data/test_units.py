"""Rows that are too long are truncated, dropped or refused as the recipe says; rows without targets are refused."""

import numpy as np
import pytest

from stages.core.errors import DataError
from stages.data.files import RowLocation
from stages.data.messages import RowError
from stages.data.tokenizer import TokenizedDocument
from stages.data.units import OverlongPolicy, Unit, check_learnable

PLACE = RowLocation("train.jsonl", 7)


def unit(*lengths, prompt=1):
    return Unit(
        tuple(
            TokenizedDocument(np.arange(n, dtype=np.int32) + k, np.arange(n) >= prompt) for k, n in enumerate(lengths)
        )
    )


def lengths(fitted):
    return [len(document) for document in fitted.documents]


@pytest.mark.parametrize("policy", ["truncate", "drop", "fail"])
def test_what_fits_is_left_alone(policy):
    over_long = OverlongPolicy(policy, 10)
    whole = unit(10)
    assert over_long.fit(whole, PLACE) is whole
    assert over_long.check(1) is None


@pytest.mark.parametrize(
    ("given", "expected"), [((11,), [10]), ((2, 30), [2, 8]), ((30, 2), [8, 2]), ((6, 6), [5, 5]), ((5, 6), [5, 5])]
)
def test_truncation_fills_the_row_and_tears_no_pair_apart(given, expected):
    assert lengths(OverlongPolicy("truncate", 10).fit(unit(*given), PLACE)) == expected


def test_truncation_keeps_the_beginning():
    (document,) = OverlongPolicy("truncate", 3).fit(unit(5), PLACE).documents
    assert document.ids.tolist() == [0, 1, 2]
    assert document.loss.tolist() == [False, True, True]


@pytest.mark.parametrize(("policy", "what"), [("truncate", "their ends were cut off"), ("drop", "they were left out")])
def test_nothing_is_cut_or_dropped_silently(policy, what):
    over_long = OverlongPolicy(policy, 10)
    over_long.fit(unit(12), PLACE)
    assert over_long.check(5) == f"1 of 5 rows have more than sequence_length 10 tokens, up to 12: {what}"


def test_over_long_rows_fail_with_their_places_and_lengths():
    over_long = OverlongPolicy("fail", 10)
    assert over_long.fit(unit(12), PLACE) is None
    with pytest.raises(
        DataError, match=r"1 of 5 rows .* up to 12: train.jsonl:7 \(12 tokens\)\. Raise `sequence_length`"
    ):
        over_long.check(5)


def test_dropping_every_row_is_an_error():
    over_long = OverlongPolicy("drop", 10)
    over_long.fit(unit(12), PLACE)
    with pytest.raises(DataError, match="leaves nothing to learn from"):
        over_long.check(1)


def test_a_row_without_tokens_to_learn_is_bad():
    check_learnable(unit(5), was_truncated=False)
    with pytest.raises(RowError, match="nothing to learn from once it is rendered"):
        check_learnable(unit(5, prompt=5), was_truncated=False)
    with pytest.raises(RowError, match="nothing to learn from in the part that sequence_length leaves"):
        check_learnable(unit(9, 5, prompt=5), was_truncated=True)


def test_a_pair_that_is_the_same_once_truncated_is_bad():
    document = unit(5).documents[0]
    with pytest.raises(RowError, match="the same `chosen` and `rejected` in the part"):
        check_learnable(Unit((document, document)), was_truncated=True)
