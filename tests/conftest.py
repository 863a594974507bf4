"""Nothing outlives the tests."""

from tests.sweeper import pytest_configure, pytest_unconfigure

__all__ = ["pytest_configure", "pytest_unconfigure"]
