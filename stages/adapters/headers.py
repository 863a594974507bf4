"""What can be known of an adapter's files without reading their weights (no torch, milliseconds): before a server."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from stages.core.errors import ModelError
from stages.models.json_object import read_json_object

ADAPTER_FOLDER = "adapter"
WEIGHTS_FILE = "adapter_model.safetensors"
CONFIG_FILE = "adapter_config.json"
PREFIX = "base_model.model."
A = ".lora_A.weight"
CHANGES_THE_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga")
"""Beginnings of `init_lora_weights` of adapters that fit a changed base only."""


@dataclass(frozen=True)
class AdapterHeaders:
    """`config`: PEFT's. `ranks`: adapted layer → rows of its A. `others`: tensors that are neither an A nor a B."""

    config: Mapping[str, Any]
    ranks: Mapping[str, int]
    others: tuple[str, ...]

    @property
    def base(self) -> str:
        """What it was trained on; of adapters that were trained here, the name of the base's artifact."""
        return str(self.config.get("base_model_name_or_path") or "")


def read_headers(folder: Path) -> AdapterHeaders:
    """Raises ModelError for files that are missing or damaged, and for an adapter without layers."""
    config = read_json_object(folder / CONFIG_FILE)
    try:
        with safe_open(folder / WEIGHTS_FILE, framework="np") as file:
            shapes = {name.removeprefix(PREFIX): file.get_slice(name).get_shape() for name in file.keys()}  # noqa: SIM118
    except (OSError, SafetensorError) as error:
        raise ModelError(f"reading the adapter in {folder}: {error}; train it again") from error
    ranks = {name.removesuffix(A): shape[0] for name, shape in shapes.items() if name.endswith(A)}
    factors = {f"{layer}.lora_{factor}.weight" for layer in ranks for factor in "AB"}
    if not ranks:
        raise ModelError(f"{folder / WEIGHTS_FILE} holds no adapted layer (`{PREFIX}LAYER{A}`); train it again")
    return AdapterHeaders(config, ranks, tuple(sorted(set(shapes) - factors)))
