"""The models and datasets that the project makes itself: no network, and the same bytes every time.

Light on purpose: a recipe is checked against this list before anything heavy is imported. A maker is a module with a
function `make(folder: Path) -> None`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from stages.hubs.hub import Product, Source


@dataclass(frozen=True)
class Builtin:
    """One thing that the project makes."""

    product: Product
    module: str
    version: int
    """Raised when the maker would write other content than before."""
    sizes: dict[str, Any] | None = None
    """Of a model: what its `config.json` will say of its shape, for a layout to be planned before it is made."""


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
    """A name of the catalog. Raises ValueError with those that there are."""
    names = sorted(name for name, builtin in BUILTINS.items() if builtin.product == product)
    if rest not in names:
        raise ValueError(f"there is no builtin {product} {rest!r}; there are: {', '.join(names)}")
    return Source(hub, product, rest, f"{hub}/{rest}")
