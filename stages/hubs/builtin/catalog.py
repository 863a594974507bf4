"""Catalog of the models and datasets that the project makes itself: no network, always the same bytes.

Light on purpose: a recipe is checked against this list before anything heavy is imported. A maker is a module with a
function `make(folder: Path) -> None`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from stages.hubs.hub import Product, Source


@dataclass(frozen=True)
class Builtin:
    """Model or dataset that the project makes itself."""

    product: Product
    module: str
    version: int
    """Version of the content; raised when the maker would write other content than before."""
    sizes: dict[str, Any] | None = None
    """Sizes in a model's `config.json`, for planning a layout before the model is made."""


QWEN3_1M: dict[str, Any] = {
    "model_type": "qwen3",
    "vocab_size": 288,
    "hidden_size": 128,
    "intermediate_size": 384,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 2048,
    "tie_word_embeddings": True,
}
BUILTINS: dict[str, Builtin] = {
    "qwen3-1m": Builtin("model", "stages.hubs.builtin.qwen3", version=2, sizes=QWEN3_1M),
    "addition": Builtin("dataset", "stages.hubs.builtin.addition", version=1),
    "addition-crawled": Builtin("dataset", "stages.hubs.builtin.addition_crawled", version=1),
    "addition-preferences": Builtin("dataset", "stages.hubs.builtin.addition_preferences", version=1),
}


def parse_builtin(hub: str, rest: str, product: Product) -> Source:
    """Return the source for a name of the catalog. Raises ValueError with the known names."""
    names = sorted(name for name, builtin in BUILTINS.items() if builtin.product == product)
    if rest not in names:
        raise ValueError(f"there is no builtin {product} {rest!r}; there are: {', '.join(names)}")
    return Source(hub, product, rest, f"{hub}/{rest}")
