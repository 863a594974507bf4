"""Packing keeps all documents, never overfills a row, and wastes little space."""

import random
from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stages.data import units as unit_module
from stages.data.units import Units, best_fit_decreasing


def units_of(lengths, first=0):
    """Return documents to be packed; each repeats its own number as token, so that tests recognize it."""
    lengths = np.array(lengths, np.int64)
    tokens = np.repeat(np.arange(first, first + len(lengths), dtype=np.int32), lengths)
    return Units(tokens, np.ones(len(tokens), np.bool_), lengths, np.ones(len(lengths), np.int64))


def pack(batches, capacity):
    """Pack batches of documents, and yield the document lengths of each packed row."""
    for units, sizes in unit_module.pack(batches, capacity):
        lengths = iter(units.lengths.tolist())
        for size in sizes:
            yield [next(lengths) for _ in range(size)]


@st.composite
def lengths_and_capacity(draw):
    capacity = draw(st.integers(1, 300))
    return draw(st.lists(st.integers(1, capacity), max_size=200)), capacity


@given(lengths_and_capacity())
def test_every_unit_is_in_exactly_one_row_and_no_row_is_over_full(drawn):
    lengths, capacity = drawn
    rows = best_fit_decreasing(lengths, capacity)
    assert sorted(index for row in rows for index in row) == list(range(len(lengths)))
    assert all(sum(lengths[index] for index in row) <= capacity for row in rows)


@given(lengths_and_capacity())
def test_at_most_one_row_is_at_most_half_full(drawn):
    lengths, capacity = drawn
    rows = best_fit_decreasing(lengths, capacity)
    assert sum(2 * sum(lengths[index] for index in row) <= capacity for row in rows) <= 1


def test_each_unit_goes_where_the_least_room_is():
    lengths = [6, 5, 4, 3, 2]
    assert [[lengths[index] for index in row] for row in best_fit_decreasing(lengths, 10)] == [[6, 4], [5, 3, 2]]
    assert best_fit_decreasing([7, 6, 3, 4], 10) == [[0, 2], [1, 3]]


@given(lengths_and_capacity(), st.integers(2, 50))
def test_a_small_window_loses_nothing_either(drawn, window_units):
    lengths, capacity = drawn
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(unit_module, "WINDOW_UNITS", window_units)
        rows = list(pack([units_of(lengths)], capacity))
        packed = list(unit_module.pack([units_of(lengths)], capacity))
    assert Counter(length for row in rows for length in row) == Counter(lengths)
    assert all(sum(row) <= capacity for row in rows)
    numbers = [number for units, _ in packed for number in units.tokens.tolist()]
    assert Counter(numbers) == Counter(dict(enumerate(lengths)))


@given(lengths_and_capacity(), st.integers(1, 7), st.integers(2, 50))
def test_how_units_come_in_batches_changes_nothing(drawn, size, window_units):
    lengths, capacity = drawn
    batches = [units_of(lengths[at : at + size], at) for at in range(0, len(lengths), size)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(unit_module, "WINDOW_UNITS", window_units)
        whole, pieces = (list(unit_module.pack(given, capacity)) for given in ([units_of(lengths)], batches))
    assert [rows for _, rows in whole] == [rows for _, rows in pieces]
    assert [units.tokens.tolist() for units, _ in whole] == [units.tokens.tolist() for units, _ in pieces]


def test_a_stream_of_many_windows_is_packed_as_well_as_one(monkeypatch):
    draw = random.Random(0)
    lengths = [min(1024, int(draw.lognormvariate(5, 1)) + 1) for _ in range(20_000)]
    monkeypatch.setattr(unit_module, "WINDOW_UNITS", 1000)
    rows = list(pack([units_of(lengths)], 1024))
    assert sum(lengths) / (1024 * len(rows)) > 0.99


def test_rows_come_before_the_stream_ends(monkeypatch):
    monkeypatch.setattr(unit_module, "WINDOW_UNITS", 10)
    taken = 0

    def units():
        nonlocal taken
        while True:
            taken += 1
            yield units_of([7])

    next(pack(units(), 16))
    assert taken == 10
