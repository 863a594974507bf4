"""Rows for the calibration of a quantization become batches without padding."""

from hypothesis import given
from hypothesis import strategies as st

from stages.kinds.quantize.samples import batches_of_one_length

ROWS = st.lists(st.lists(st.integers(0, 99), min_size=2, max_size=9), max_size=20)


@given(rows=ROWS, max_tokens=st.integers(1, 30))
def test_every_row_is_in_one_batch_unpadded_and_batches_are_no_larger_than_asked(rows, max_tokens):
    batches = list(batches_of_one_length(rows, max_tokens))
    assert sorted(row for batch in batches for row in batch.tolist()) == sorted(rows)
    assert all(batch.numel() <= max_tokens or len(batch) == 1 for batch in batches)


def test_order_depends_on_the_rows_alone():
    rows = [[1, 2], [3, 4, 5], [6, 7]]
    assert [batch.tolist() for batch in batches_of_one_length(rows, 100)] == [[[1, 2], [6, 7]], [[3, 4, 5]]]
