"""End of the program that walks through models for all tests of the zoo."""

from collections.abc import Iterator

import pytest

from tests.zoo.planning import end_program


@pytest.fixture(autouse=True, scope="session")
def walks_end() -> Iterator[None]:
    yield
    end_program()
