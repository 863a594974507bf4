"""Checks of a quantized model folder in compressed-tensors' format, and copying of the files beside its weights."""

import shutil
from collections.abc import Iterator, Mapping, Set
from pathlib import Path

from safetensors import safe_open

from stages.core.errors import ModelError
from stages.models.carried_weights import changed_or_lost
from stages.models.facts import ModelFacts

PACKED_TYPES = {"I32", "I8", "F8_E4M3"}
"""Types of quantized weights in files: eight 4-bit numbers in an int32, or 8 bits each."""
NUM_NAMED = 3


def quantized_in_files(folder: Path) -> set[str]:
    """Return the names of the layers that are stored quantized: packed weights with scales."""
    types = dict[str, str]()
    for path in folder.glob("*.safetensors"):
        with safe_open(path, framework="np") as weights:
            types |= {key: weights.get_slice(key).get_dtype() for key in weights.keys()}  # noqa: SIM118 – no mapping
    packed = {key for key, dtype in types.items() if dtype in PACKED_TYPES}
    return {
        key.removesuffix(".weight_scale")
        for key in types
        if key.endswith(".weight_scale") and packed & {key.replace("_scale", suffix) for suffix in ("", "_packed")}
    }


def problems_of_written(folder: Path, expected: set[str]) -> Iterator[ModelError]:
    """Yield an error for each difference from what was to be quantized: the `expected` layers (names in files)."""
    quantized = quantized_in_files(folder)
    if missing := sorted(expected - quantized):
        yield ModelError(
            f"the quantizer wrote {len(quantized & expected)} of {len(expected)} layers quantized; it left out "
            f"{', '.join(missing[:NUM_NAMED])}; add them to `ignore`, or choose another method"
        )
    if unexpected := sorted(quantized - expected):
        yield ModelError(
            f"the quantizer wrote {len(unexpected)} layers quantized that should stay unquantized: "
            f"{', '.join(unexpected[:NUM_NAMED])}; choose another method"
        )
    if not ModelFacts(folder).config.get("quantization_config", {}).get("quant_method"):
        yield ModelError(
            f"the quantizer wrote no `quantization_config` into {folder / 'config.json'}: no server can read it"
        )


def problems_of_carried(source: Path, target: Path, carried: Set[str]) -> Iterator[ModelError]:
    """Yield an error if weights of `source` that no quantizer loads, such as MTP layers, are not in `target` as is."""
    if lost := changed_or_lost(source, target, carried):
        yield ModelError(
            f"the quantizer lost or changed {len(lost)} of {len(carried)} weights that the model does not load itself, "
            f"such as layers of multi-token prediction ({', '.join(lost[:NUM_NAMED])}); choose another method"
        )


def problems_beside_text(source: Path, target: Path, beside_text: Mapping[str, Set[str]]) -> Iterator[ModelError]:
    """Yield an error for each part of a model that sees, beside its language part, that is not as it was in `source`.

    beside_text: names of the part's weights in files. Equal bit for bit, once in the dtype that `target` has them in.
    """
    for part, names in beside_text.items():
        if changed := sorted(changed_or_lost(source, target, names, in_dtype=True)):
            yield ModelError(
                f"the quantizer lost or changed {len(changed)} of {len(names)} weights of the model's "
                f"{part.replace('_', ' ')}, which should stay as they are ({', '.join(changed[:NUM_NAMED])}); choose "
                "another method"
            )


def copy_companions(source: Path, target: Path) -> None:
    """Copy the tokenizer, chat template, generation config and all other files except weights and `config.json`."""
    for path in source.iterdir():
        weights = path.suffix == ".safetensors" or path.name.endswith(".safetensors.index.json")
        if path.is_file() and not weights and path.name != "config.json":
            shutil.copy(path, target / path.name)
