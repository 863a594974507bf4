"""An adapter's folder, in PEFT's format: `adapter_model.safetensors`, `adapter_config.json`, and the tokenizer.

Names in the file are those of the Transformers model, between `base_model.model.` and `.lora_A.weight`. A file is
refused when it is written with a B that is all 0 (that layer would have learned nothing) or not finite, and when it is
read with anything that `merge` would leave out.
"""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stages.core.errors import ModelError
from stages.core.files import write_atomically
from stages.models.model_folder import follow_file_mask
from stages.models.weight_files import weight_paths

if TYPE_CHECKING:
    from torch import Tensor

ADAPTER_FOLDER = "adapter"
WEIGHTS_FILE = "adapter_model.safetensors"
CONFIG_FILE = "adapter_config.json"
PREFIX = "base_model.model."
NUM_NAMED = 5
COMPANIONS = ("tokenizer", "chat_template", "special_tokens", "added_tokens", "vocab", "merges", "trained_on")
UNKNOWN = {"use_dora": False, "bias": "none", "modules_to_save": None, "lora_bias": False, "target_parameters": None}
"""Fields of PEFT's config that a merge by B A alone would get wrong, and the values at which it does not."""


@dataclass(frozen=True)
class Adapter:
    """What is on disk. `factors`: layer's name in the Transformers model → (A [rank, in], B [out, rank])."""

    base: str
    """Artifact that it was trained on: stage and version."""
    factors: Mapping[str, tuple[Tensor, Tensor]]
    scaling: float
    is_transposed: bool
    """Whether the base's weights are [in, out], as those of GPT-2."""

    def change(self, layer: str) -> Tensor:
        """fp32: what the adapter adds to the layer's weight, in the weight's shape."""
        a, b = self.factors[layer]
        product = self.scaling * (b.float() @ a.float())
        return product.T if self.is_transposed else product


def write_adapter(
    folder: Path, factors: Mapping[str, Tensor], peft_config: Mapping[str, Any], base: Path, dtype: Any
) -> None:
    """Write the adapter's parameters (`LAYER.lora_A.default.weight` → tensor on the CPU) beside the base's tokenizer.

    base: the model folder that it was trained on. Raises ModelError when a B has learned nothing or is not finite.
    """
    from safetensors.torch import save_file

    written = {
        f"{PREFIX}{name.replace('.default.', '.')}": weight.to(dtype).contiguous() for name, weight in factors.items()
    }
    _check_learned({name: weight for name, weight in written.items() if ".lora_B." in name})
    folder.mkdir(parents=True, exist_ok=True)
    save_file(written, folder / WEIGHTS_FILE, metadata={"format": "pt"})
    follow_file_mask(folder / WEIGHTS_FILE)
    config = {**peft_config, "base_model_name_or_path": base.parent.name, "inference_mode": True}
    ordered = {name: sorted(value) if isinstance(value, set) else value for name, value in sorted(config.items())}
    write_atomically(folder / CONFIG_FILE, json.dumps(ordered, indent=2) + "\n")
    copy_companions(base, folder)


def copy_companions(source: Path, folder: Path) -> None:
    """Copy the tokenizer and its chat template from one model or adapter folder to another."""
    for path in source.iterdir():
        if path.is_file() and path.name.startswith(COMPANIONS):
            shutil.copyfile(path, folder / path.name)


def read_adapter(folder: Path) -> Adapter:
    """The adapter in `folder`. Raises ModelError for files that are damaged, or hold what cannot be merged."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        config = json.loads((folder / CONFIG_FILE).read_text(encoding="utf-8"))
        tensors = load_file(folder / WEIGHTS_FILE)
    except (OSError, ValueError, SafetensorError) as error:
        raise ModelError(f"reading the adapter in {folder}: {error}; train it again") from error
    odd = [f"{name}: {config[name]}" for name, plain in UNKNOWN.items() if config.get(name, plain) not in (plain, [])]
    if config.get("peft_type") != "LORA" or odd or config.get("rank_pattern") or config.get("alpha_pattern"):
        raise ModelError(
            f"the adapter in {folder} is a {config.get('peft_type')} with {', '.join(odd) or 'patterns of ranks'}; "
            "expected a plain LoRA"
        )
    layers = {name.removesuffix(".lora_A.weight") for name in tensors if name.endswith(".lora_A.weight")}
    expected = {f"{layer}.lora_{factor}.weight" for layer in layers for factor in "AB"}
    if not layers or expected != set(tensors) or not all(layer.startswith(PREFIX) for layer in layers):
        unknown = sorted(expected ^ set(tensors)) or sorted(tensors)
        raise ModelError(
            f"{folder / WEIGHTS_FILE}: {', '.join(unknown[:NUM_NAMED])} unexpected or without a partner; expected "
            f"`{PREFIX}LAYER.lora_A.weight` and `…lora_B.weight` of every adapted layer"
        )
    rank = config["r"]
    return Adapter(
        base=config.get("base_model_name_or_path") or "",
        factors={
            layer.removeprefix(PREFIX): (tensors[f"{layer}.lora_A.weight"], tensors[f"{layer}.lora_B.weight"])
            for layer in layers
        },
        scaling=config["lora_alpha"] / (math.sqrt(rank) if config.get("use_rslora") else rank),
        is_transposed=bool(config.get("fan_in_fan_out")),
    )


def check_mergeable(layers: Collection[str], base: Path) -> None:
    """Raise ModelError unless each adapted layer has a weight of its name in the files of the model folder `base`.

    Some architectures are stored under other names than they have in memory; an adapter could not be merged into them.
    """
    from safetensors import safe_open

    stored: set[str] = set()
    for path in weight_paths(base):
        with safe_open(path, framework="pt") as file:
            stored.update(file.keys())
    if lost := sorted(layer for layer in layers if f"{layer}.weight" not in stored):
        raise ModelError(
            f"training an adapter on {base}: {len(lost)} of its layers have other names in the model's files "
            f"({', '.join(lost[:NUM_NAMED])}), so it could not be merged; save the model again with Transformers' "
            "`save_pretrained`, or name layers of the language model in adapter.target_modules"
        )


def _check_learned(named: Mapping[str, Tensor]) -> None:
    broken = [name for name, weight in named.items() if not weight.isfinite().all()]
    zero = [name for name, weight in named.items() if not weight.any()]
    if broken or zero:
        raise ModelError(
            f"writing the adapter: of {len(named)} factors B {len(zero)} are all 0 ({', '.join(zero[:NUM_NAMED])}) and "
            f"{len(broken)} not finite ({', '.join(broken[:NUM_NAMED])}): these layers have learned nothing; raise the "
            "learning rate or the steps, or leave them out of adapter.target_modules"
        )
