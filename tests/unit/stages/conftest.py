"""Fixture with a second serving engine that only the registry knows."""

import pytest

from stages.serving import registry
from tests.tiny_engine import TinyEngine


@pytest.fixture
def tiny_engine(monkeypatch: pytest.MonkeyPatch) -> TinyEngine:
    """Register the tiny serving engine, and make it the default."""
    engine = TinyEngine()
    monkeypatch.setitem(registry.ENGINES, engine.name, engine)
    monkeypatch.setattr(registry, "DEFAULT_ENGINE", engine.name)
    return engine
