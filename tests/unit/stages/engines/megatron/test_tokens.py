"""Context parallelism puts each token on one rank, with equal work on all ranks, and can be undone."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from stages.data.batch import Batch, Documents
from stages.engines.megatron.tokens import padded_size, split_tokens

documents = st.lists(st.integers(1, 40), min_size=1, max_size=12)
ranks = st.sampled_from([1, 2, 3, 4])


def batch_of(lengths: list[int]) -> Batch:
    num_tokens = sum(lengths)
    ids = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))
    positions = torch.cat([torch.arange(length) for length in lengths])
    tokens = torch.arange(100, 100 + num_tokens)
    return Batch.of(tokens[None], tokens[None], positions[None], Documents(ids[None], len(lengths), lengths))


@given(documents, ranks, st.sampled_from([1, 2]))
def test_every_token_is_with_one_rank_at_its_own_position(lengths, num_ranks, tp):
    batch = batch_of(lengths)
    split = split_tokens(batch, num_ranks, padded_size([batch], num_ranks, tp))
    is_real = split.origins < sum(lengths)
    assert sorted(split.origins[is_real].tolist()) == list(range(sum(lengths)))
    origins = split.origins[is_real]
    assert torch.equal(split.positions[is_real], batch.inputs.position_ids[0, origins])
    own = torch.repeat_interleave(torch.tensor(split.lengths))[split.places]  # document of each token
    assert torch.equal(own[is_real], batch.documents.ids[0, origins])


@given(documents, ranks, st.sampled_from([1, 2]))
def test_ranks_hold_equally_many_tokens_that_tensor_parallelism_can_split(lengths, num_ranks, tp):
    batch = batch_of(lengths)
    size = padded_size([batch], num_ranks, tp)
    split = split_tokens(batch, num_ranks, size)
    assert split.origins.shape == (num_ranks, size // num_ranks)
    assert split.origins.shape[1] % tp == 0
    assert sum(split.lengths) == size


@given(documents, ranks)
def test_causal_attention_is_equally_much_work_on_every_rank(lengths, num_ranks):
    batch = batch_of(lengths)
    split = split_tokens(batch, num_ranks, padded_size([batch], num_ranks, 1))
    pairs = (split.positions + 1).sum(1)
    assert pairs.unique().numel() == 1


@given(documents, ranks)
def test_micro_batches_of_a_step_are_padded_to_one_length(lengths, num_ranks):
    batches = [batch_of(lengths), batch_of([*lengths, 7, 1])]
    size = padded_size(batches, num_ranks, 1)
    assert {split_tokens(batch, num_ranks, size).origins.numel() for batch in batches} == {size}


def test_a_rank_takes_a_chunk_from_either_end_of_each_document():
    batch = batch_of([8, 4])
    split = split_tokens(batch, 2, padded_size([batch], 2, 1))
    assert split.origins.tolist() == [[0, 1, 6, 7, 8, 11], [2, 3, 4, 5, 9, 10]]


def test_a_split_of_values_puts_the_given_value_where_padding_is():
    batch = batch_of([3])
    split = split_tokens(batch, 2, padded_size([batch], 2, 1))
    assert split.local(batch.inputs.input_ids, 0, padding=-1).tolist() == [[100, -1]]
    assert split.local(batch.inputs.input_ids, 1, padding=-1).tolist() == [[101, 102]]
