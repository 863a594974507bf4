"""A second serving engine, as new as one can be: known to the registry alone."""

import pytest

from stages.serving import registry
from tests.tiny_engine import TinyEngine


@pytest.fixture
def tiny_engine(monkeypatch: pytest.MonkeyPatch) -> TinyEngine:
    """Registered, and what new servers are started with."""
    engine = TinyEngine()
    monkeypatch.setitem(registry.ENGINES, engine.name, engine)
    monkeypatch.setattr(registry, "DEFAULT_ENGINE", engine.name)
    return engine
