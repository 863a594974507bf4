"""Fixtures that let the tests of an engine share one import of it."""

from collections.abc import Iterator

import pytest

from tests.parity.ranks import Ranks, started_ranks


@pytest.fixture(scope="session")
def fsdp_ranks() -> Iterator[Ranks]:
    """Parent of ranks without Megatron."""
    with started_ranks() as ranks:
        yield ranks


@pytest.fixture(scope="session")
def megatron_ranks() -> Iterator[Ranks]:
    """Parent of ranks with Megatron patched for CPUs; it runs only Megatron programs."""
    with started_ranks() as ranks:
        yield ranks
