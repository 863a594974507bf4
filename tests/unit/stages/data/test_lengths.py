"""Histogram of document lengths: each document is counted once, in the right bin."""

from itertools import pairwise

import numpy as np
import pytest

from stages.data.summaries import NUM_BINS, count_lengths


@pytest.mark.parametrize("longest", [1, 7, NUM_BINS, NUM_BINS + 1, 4096])
def test_every_document_is_in_the_bin_of_its_length(longest: int) -> None:
    lengths = np.random.default_rng(0).integers(1, longest, 500, endpoint=True)
    lengths[0] = longest

    found = count_lengths({"a": lengths, "b": np.array([longest, 1])})

    edges = [found.bin_tokens * number for number in range(len(found.counts["a"]) + 1)]
    expected = [int(((lengths > low) & (lengths <= high)).sum()) for low, high in pairwise(edges)]
    assert list(found.counts["a"]) == expected and sum(expected) == 500
    assert len(found.counts["b"]) == len(expected) <= NUM_BINS and sum(found.counts["b"]) == 2


def test_a_dataset_without_documents_has_none() -> None:
    assert count_lengths({"": np.array([], np.int64)}).counts == {"": (0,)}
