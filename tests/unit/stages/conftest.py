"""Fixture that registers a second serving engine for tests, of which our own code knows nothing."""

import pytest

from stages.serving import registry
from tests.tiny_engine import TinyEngine


@pytest.fixture
def tiny_engine(monkeypatch: pytest.MonkeyPatch) -> TinyEngine:
    """Register a tiny serving engine for tests, and make it the default engine."""
    engine = TinyEngine()
    monkeypatch.setitem(registry.ENGINES, engine.name, engine)
    monkeypatch.setattr(registry, "DEFAULT_ENGINE", engine.name)
    return engine
