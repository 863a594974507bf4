"""Adapter options that a training engine does not support. Pure; needs no torch."""

from __future__ import annotations

import json
from collections.abc import Iterator

from stages.adapters.config import AdapterConfig
from stages.parallel.layout import EngineName

MEGATRON_HONOURS = {
    "type",
    "rank",
    "alpha",
    "dropout",
    "target_modules",
    "target_parameters",
    "exclude_modules",
    "layers_to_transform",
    "use_rslora",
    "loraplus_lr_ratio",
}
"""Options that Megatron supports. All others must have their defaults: they are refused, never silently left out."""


def adapter_errors(engine: EngineName, adapter: AdapterConfig) -> Iterator[str]:
    """Yield a sentence for each option that the engine does not support; FSDP2 supports all."""
    if engine != "megatron":
        return
    default = type(adapter)()
    for name, value in adapter:
        if name not in MEGATRON_HONOURS and value != getattr(default, name):
            yield f"`adapter.{name}: {json.dumps(value)}` needs `engine: fsdp`, found megatron; change either"
