import os
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def file_modes_as_before() -> Iterator[None]:
    """Restore the umask after a test, since commands that run in this process make it stricter."""
    before = os.umask(0o022)
    os.umask(before)
    yield
    os.umask(before)
