"""Catalog of the models and datasets that this project generates itself (`builtin/NAME`), without network.

Light: every recipe is checked against it. A maker is a module with a function `make(folder: Path) -> None`.
"""

import importlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stages.core.contract import StageContext
from stages.hubs.hub import Product, Request, Source

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

QWEN3_TOOLS_1M: dict[str, Any] = {**QWEN3_1M, "vocab_size": 512}

QWEN3_VL_1M: dict[str, Any] = {
    "model_type": "qwen3_vl",
    "text_config": {
        "model_type": "qwen3_vl_text",
        "vocab_size": 320,
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "max_position_embeddings": 2048,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10000.0,
            "mrope_section": [8, 4, 4],
            "mrope_interleaved": True,
        },
    },
    "vision_config": {
        "model_type": "qwen3_vl",
        "depth": 3,
        "hidden_size": 96,
        "intermediate_size": 192,
        "num_heads": 3,
        "patch_size": 8,
        "out_hidden_size": 128,
        "num_position_embeddings": 64,
        "deepstack_visual_indexes": [1],
    },
    "tie_word_embeddings": True,
}


@dataclass(frozen=True)
class Builtin:
    """Catalog entry for a model or dataset that this project generates itself."""

    product: Product
    module: str
    version: int
    """Version of the generated content, raised when the generating module would write other content than before."""
    sizes: dict[str, Any] | None = None
    """Model sizes as in `config.json`, so that its parallel layout can be planned before the model is generated."""


BUILTINS: dict[str, Builtin] = {
    "qwen3-1m": Builtin("model", "stages.hubs.builtin.qwen3", version=2, sizes=QWEN3_1M),
    "qwen3-tools-1m": Builtin("model", "stages.hubs.builtin.qwen3_tools", version=1, sizes=QWEN3_TOOLS_1M),
    "qwen3-vl-1m": Builtin("model", "stages.hubs.builtin.qwen3_vl", version=1, sizes=QWEN3_VL_1M),
    "addition": Builtin("dataset", "stages.hubs.builtin.addition", version=1),
    "addition-crawled": Builtin("dataset", "stages.hubs.builtin.addition_crawled", version=1),
    "addition-preferences": Builtin("dataset", "stages.hubs.builtin.addition_preferences", version=1),
    "calculator": Builtin("dataset", "stages.hubs.builtin.calculator", version=1),
    "digits": Builtin("dataset", "stages.hubs.builtin.digits", version=1),
    "digits-preferences": Builtin("dataset", "stages.hubs.builtin.digits_preferences", version=1),
    "products": Builtin("dataset", "stages.hubs.builtin.products", version=1),
}


def parse_builtin(hub: str, rest: str, product: Product) -> Source:
    """Return the source for a generated model or dataset (`builtin/NAME`). Raises ValueError with the known names."""
    names = sorted(name for name, builtin in BUILTINS.items() if builtin.product == product)
    if rest not in names:
        raise ValueError(f"there is no builtin {product} {rest!r}; there are: {', '.join(names)}")
    return Source(hub, product, rest, f"{hub}/{rest}")


class Builtins:
    """Hub of the models and datasets that this project generates. A revision is the generated content's version."""

    def resolve_revision(self, request: Request) -> str:
        return str(BUILTINS[request.source.name].version)

    def deliver(self, request: Request, revision: str, folder: Path, context: StageContext) -> None:
        folder.mkdir()
        builtin = BUILTINS[request.source.name]
        if builtin.product == "model":
            from stages.models.start_up import hide_unused_packages  # and Transformers, in a second

            hide_unused_packages()
        importlib.import_module(builtin.module).make(folder)

    def read_file(self, source: Source, revision: str, name: str) -> str | None:
        sizes = BUILTINS[source.name].sizes
        return json.dumps(sizes) if sizes and name == "config.json" else None


HUB = Builtins()
