"""Global batches are the same under every layout, and each epoch visits every row once."""

from itertools import chain

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stages.kinds.train.order import DataOrder, dealt, even_micro_batches


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


@given(
    costs=st.lists(st.floats(1, 100), min_size=24, max_size=24),
    micro_batch_size=st.integers(1, 4),
    num_ranks=st.sampled_from([2, 3, 4]),
)
def test_rows_that_are_dealt_by_cost_are_the_global_batch(costs, micro_batch_size, num_ranks):
    shares = dealt(costs, micro_batch_size, num_ranks)
    assert sorted(chain(*chain(*shares))) == list(range(24))
    assert len({tuple(map(len, share)) for share in shares}) == 1
    assert all(len(micro_batch) <= micro_batch_size for micro_batch in shares[0])


@pytest.mark.parametrize(("tower", "tokens"), [(0.39, 1200), (0.13, 1200), (0.92, 256), (2.75, 256)])
def test_no_process_waits_for_another_with_more_pictures(tower, tokens):
    """Costs, in tokens of the language model, of Qwen2.5-VL-7B and Gemma 3 4B, learning and frozen; 8 processes."""
    ratios, unsorted = [], []
    for step in range(50):
        rng = np.random.default_rng(step)
        pictures = np.minimum(4096 // tokens, 1 + rng.exponential(2048 / tokens, 64).astype(int))
        costs = 4096 + tower * tokens * pictures * (rng.random(64) < 0.5)
        taken = [sum(costs[place] for place in chain(*share)) for share in dealt(costs, 2, 8)]
        waited = sum(max(costs[share[number]].sum() for share in dealt(costs, 2, 8)) for number in range(4))
        ratios += [max(taken) / np.mean(taken), waited / np.mean(taken)]
        unsorted.append(costs.reshape(4, 8, 2).sum(2).max(1).sum() / np.mean(taken))
    assert max(ratios) <= 1.1
    assert np.mean(unsorted) > np.mean(ratios)


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
