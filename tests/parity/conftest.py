"""Fixtures that fork the processes of parity tests from one parent, so that an engine is imported once."""

from collections.abc import Iterator

import pytest

from tests.parity.ranks import Ranks, started_ranks


@pytest.fixture(scope="session")
def fsdp_ranks() -> Iterator[Ranks]:
    """Provide the parent from which processes of the FSDP engine are forked."""
    with started_ranks() as ranks:
        yield ranks


@pytest.fixture(scope="session")
def megatron_ranks() -> Iterator[Ranks]:
    """Provide the parent from which processes of Megatron, patched for CPUs, are forked; no others may use it."""
    with started_ranks() as ranks:
        yield ranks
