"""Packed documents are rearranged into padded batches that hold each token once, with little padding."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from stages.engines.documents import LEAST_FILL, PackedDocuments

CPU = torch.device("cpu")
lengths_of_documents = st.lists(st.integers(1, 200), min_size=1, max_size=40)


@given(lengths_of_documents)
def test_slots_hold_every_document_in_one_piece(lengths: list[int]) -> None:
    documents = PackedDocuments(lengths, CPU)
    pieces = documents.slots.split(lengths)
    places = [(bucket, (int(piece[0]) - bucket.start)) for piece in pieces for bucket in documents.buckets
              if bucket.start <= int(piece[0]) < bucket.end]  # fmt: skip
    for piece, length, (bucket, offset) in zip(pieces, lengths, places, strict=True):
        assert piece.tolist() == list(range(int(piece[0]), int(piece[0]) + length))
        assert offset % bucket.length == 0
        assert LEAST_FILL * bucket.length <= length <= bucket.length
    assert len({int(piece[0]) for piece in pieces}) == len(lengths)


@given(lengths_of_documents)
def test_buckets_follow_each_other_and_hold_all_documents(lengths: list[int]) -> None:
    documents = PackedDocuments(lengths, CPU)
    ends = [0, *(bucket.end for bucket in documents.buckets)]
    assert [bucket.start for bucket in documents.buckets] == ends[:-1]
    assert sum(bucket.num_documents for bucket in documents.buckets) == len(lengths)
    assert documents.num_slots == ends[-1] <= sum(lengths) / LEAST_FILL


@given(lengths_of_documents)
def test_without_a_least_fill_there_is_one_bucket(lengths: list[int]) -> None:
    (bucket,) = PackedDocuments(lengths, CPU, least_fill=0).buckets
    assert (bucket.num_documents, bucket.length) == (len(lengths), max(lengths))


def test_boundaries_are_where_documents_start_and_end() -> None:
    boundaries = PackedDocuments([3, 1, 2], CPU).boundaries
    assert boundaries.tolist() == [0, 3, 4, 6]
    assert boundaries.dtype == torch.int32
