"""Global batches are the same under every layout, and each epoch visits every row once."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from stages.kinds.train.order import DataOrder, even_micro_batches


def make_order(num_rows=7, global_batch_size=4, micro_batch_size=1, data_rank=0, data_parallel_size=1, seed=0):
    return DataOrder(num_rows, global_batch_size, micro_batch_size, data_rank, data_parallel_size, seed)


@given(
    num_rows=st.integers(1, 40),
    micro_batch_size=st.integers(1, 3),
    data_parallel_size=st.integers(1, 4),
    num_micro_batches=st.integers(1, 3),
    step=st.integers(1, 20),
)
def test_the_shares_of_all_processes_are_the_global_batch(
    num_rows, micro_batch_size, data_parallel_size, num_micro_batches, step
):
    global_batch_size = micro_batch_size * data_parallel_size * num_micro_batches
    shares = [
        make_order(num_rows, global_batch_size, micro_batch_size, rank, data_parallel_size).micro_batches(step)
        for rank in range(data_parallel_size)
    ]
    assert all(len(micro_batch) == micro_batch_size for share in shares for micro_batch in share)
    rows = [row for share in shares for micro_batch in share for row in micro_batch]
    assert rows == make_order(num_rows, global_batch_size).global_batch(step)


def test_every_epoch_is_another_permutation_of_all_rows():
    order = make_order(num_rows=12, global_batch_size=4)
    epochs = [[row for step in (1, 2, 3) for row in order.global_batch(3 * epoch + step)] for epoch in range(3)]
    assert all(sorted(epoch) == list(range(12)) for epoch in epochs)
    assert epochs[0] != epochs[1] != epochs[2]


def test_another_seed_gives_another_order():
    assert make_order(100, 50, seed=0).global_batch(1) != make_order(100, 50, seed=1).global_batch(1)


@given(num_rows=st.integers(0, 30), micro_batch_size=st.integers(1, 4), data_parallel_size=st.integers(1, 4))
def test_all_rows_are_dealt_out_in_equally_many_micro_batches(num_rows, micro_batch_size, data_parallel_size):
    shares = [
        list(even_micro_batches(num_rows, micro_batch_size, rank, data_parallel_size))
        for rank in range(data_parallel_size)
    ]
    assert len({len(share) for share in shares}) == 1
    assert sorted(row for share in shares for micro_batch in share for row in micro_batch) == list(range(num_rows))
    assert all(len(micro_batch) <= micro_batch_size for share in shares for micro_batch in share)
