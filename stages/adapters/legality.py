"""Adapter options that a training engine does not support. Pure; needs no torch."""

from __future__ import annotations

import json
from collections.abc import Iterator

from stages.adapters.config import AdapterConfig
from stages.parallel.engines.registry import RULES, needs_other_engine
from stages.parallel.layout import EngineName


def adapter_errors(engine: EngineName, adapter: AdapterConfig) -> Iterator[str]:
    """Yield a sentence for each option that the engine does not support: it is refused, never silently left out."""
    default = type(adapter)()
    for name, value in adapter:
        if value != getattr(default, name) and not RULES[engine].supports_adapter_option(name):
            supporting = (other for other, rules in RULES.items() if rules.supports_adapter_option(name))
            yield needs_other_engine(f"adapter.{name}: {json.dumps(value)}", engine, " or ".join(supporting))
