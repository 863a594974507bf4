"""Fixture that lets all Megatron tests share one import of it."""

from collections.abc import Iterator

import pytest

from tests.parity.ranks import Ranks, started_ranks


@pytest.fixture(scope="session")
def megatron_ranks() -> Iterator[Ranks]:
    """A parent of ranks that has patched Megatron for a CPU: nothing else may run in it."""
    with started_ranks() as ranks:
        yield ranks
