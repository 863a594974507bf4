import os
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def file_modes_as_before() -> Iterator[None]:
    """The command keeps its files to their owner by the process's mask, which outlives a call from a test."""
    before = os.umask(0o022)
    os.umask(before)
    yield
    os.umask(before)
