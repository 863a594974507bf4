"""Packing loses nothing, never overfills a row, and leaves little room."""

from __future__ import annotations

import random
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stages.data import packing
from stages.data.packing import best_fit_decreasing, pack


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
        patch.setattr(packing, "WINDOW_UNITS", window_units)
        rows = list(pack([range(length) for length in lengths], capacity))
    assert Counter(len(unit) for row in rows for unit in row) == Counter(lengths)
    assert all(sum(map(len, row)) <= capacity for row in rows)


def test_a_stream_of_many_windows_is_packed_as_well_as_one(monkeypatch):
    draw = random.Random(0)
    units = [range(min(1024, int(draw.lognormvariate(5, 1)) + 1)) for _ in range(20_000)]
    monkeypatch.setattr(packing, "WINDOW_UNITS", 1000)
    rows = list(pack(units, 1024))
    assert sum(map(len, units)) / (1024 * len(rows)) > 0.99


def test_rows_come_before_the_stream_ends(monkeypatch):
    monkeypatch.setattr(packing, "WINDOW_UNITS", 10)
    taken = 0

    def units():
        nonlocal taken
        while True:
            taken += 1
            yield range(7)

    next(pack(units(), 16))
    assert taken == 10
