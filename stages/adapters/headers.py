"""Checks of an adapter's files by their headers (no torch, milliseconds), before a server or a training starts.

Files come from others, so what is read of `adapter_config.json`, and dtypes and shapes of the tensors, is checked
before it is used. An idle adapter has 0 for every B: servers ask it instead of the base, because vLLM answers requests
to a base wrongly once every slot has an adapter (`stages/serving/vllm/adapters.py`).
"""

import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stages.core.errors import ModelError
from stages.core.files import read_json_object
from stages.core.redaction import quoted
from stages.models.weight_files import FLOAT_BYTES, StoredTensor, read_tensors

ADAPTER_FOLDER = "adapter"
WEIGHTS_FILE = "adapter_model.safetensors"
CONFIG_FILE = "adapter_config.json"
PREFIX = "base_model.model."
A, B = ".lora_A.weight", ".lora_B.weight"
NUM_NAMED = 5
VALUE_CHARACTERS = 60
MOST_ALPHA = 1e9
CHANGES_THE_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga")
"""Prefixes of PEFT's `init_lora_weights` for adapters that fit only a base changed at the start."""


@dataclass(frozen=True)
class AdapterHeaders:
    """Config and tensor headers of an adapter in PEFT's format.

    ranks: LoRA ranks, the rows of A, by adapted layer. others: tensors that are neither an A nor a B.
    """

    config: Mapping[str, Any]
    ranks: Mapping[str, int]
    others: tuple[str, ...]

    @property
    def base(self) -> str:
        """Name of the base model that the adapter was trained on; for adapters trained here, its artifact."""
        return str(self.config.get("base_model_name_or_path") or "")


def read_headers(folder: Path) -> AdapterHeaders:
    """Read and check PEFT's config and the tensor headers of an adapter.

    Raises ModelError for missing or damaged files, fields and tensors that no LoRA has, and no layers.
    """
    try:
        config = read_json_object(folder / CONFIG_FILE)
        tensors = {one.name.removeprefix(PREFIX): one for one in read_tensors(folder / WEIGHTS_FILE)}
    except (OSError, ModelError) as error:
        raise ModelError(f"reading the adapter in {folder}: {error}; train it again") from error
    _check_fields(config, folder / CONFIG_FILE)
    _check_tensors(tensors, folder / WEIGHTS_FILE)
    ranks = {name.removesuffix(A): one.shape[0] for name, one in tensors.items() if name.endswith(A)}
    factors = {f"{layer}.lora_{factor}.weight" for layer in ranks for factor in "AB"}
    if not ranks:
        raise ModelError(f"{folder / WEIGHTS_FILE} holds no adapted layer (`{PREFIX}LAYER{A}`); train it again")
    return AdapterHeaders(config, ranks, tuple(sorted(set(tensors) - factors)))


def _is_rank(value: Any) -> bool:
    # to Python, True is an int
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def _is_alpha(value: Any) -> bool:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return is_number and 0 < abs(value) <= MOST_ALPHA  # NaN is in no range


def _is_flag(value: Any) -> bool:
    return value is None or isinstance(value, bool)


def _is_text(value: Any) -> bool:
    return value is None or isinstance(value, str)


def _are_names(value: Any) -> bool:
    return value is None or (isinstance(value, list) and all(isinstance(one, str) for one in value))


def _by_pattern(is_value: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: value is None or (isinstance(value, dict) and all(map(is_value, value.values())))


RANK, ALPHA = "a whole number above 0", f"a number other than 0, of at most {MOST_ALPHA:g}"
NAMES, FLAG = "a list of names, or null", "true, false or null"
FIELDS: dict[str, tuple[Callable[[Any], bool], str]] = {
    "r": (_is_rank, RANK),
    "lora_alpha": (_is_alpha, ALPHA),
    "rank_pattern": (_by_pattern(_is_rank), f"a mapping of patterns, each to {RANK}, or null"),
    "alpha_pattern": (_by_pattern(_is_alpha), f"a mapping of patterns, each to {ALPHA}, or null"),
    "base_model_name_or_path": (_is_text, "a name, or null"),
    "modules_to_save": (_are_names, NAMES),
    "target_parameters": (_are_names, NAMES),
    **dict.fromkeys(("use_rslora", "use_dora", "fan_in_fan_out"), (_is_flag, FLAG)),
}
"""Checked fields of PEFT's config: a function that accepts a value, and the expected value in words."""
REQUIRED = ("r", "lora_alpha")
"""Fields that PEFT's config must have, since PEFT's defaults may differ from what the adapter was trained with."""


def _check_fields(config: Mapping[str, Any], file: Path) -> None:
    """Raise ModelError for the first field of PEFT's config that is missing or has an impossible value."""
    if config.get("peft_type") != "LORA":
        return  # what reads it names its type
    for name, (is_valid, expected) in FIELDS.items():
        if name not in config and name not in REQUIRED:
            continue
        if name not in config or not is_valid(config[name]):
            given = quoted(config[name], VALUE_CHARACTERS) if name in config else "nothing"
            raise ModelError(
                f"reading {file}: the field `{name}`: found {given}, expected {expected}; take the file from where the "
                "adapter was trained"
            )


def _check_tensors(tensors: Mapping[str, StoredTensor], file: Path) -> None:
    """Raise ModelError for adapter tensors that are not plain floats, and for factors that cannot be multiplied."""
    factors = [one for name, one in tensors.items() if name.endswith((A, B))]
    pairs = [(tensors[name], tensors.get(name.removesuffix(A) + B)) for name in tensors if name.endswith(A)]
    checks: list[tuple[list[StoredTensor], str]] = [
        ([one for one in tensors.values() if one.dtype not in FLOAT_BYTES], f"numbers of {', '.join(FLOAT_BYTES)}"),
        (
            [one for one in factors if len(one.shape) != 2],
            "a matrix for each factor: what is no matrix is of no linear layer (but of a convolution, say)",
        ),
        (
            [one for a, b in pairs if b and a.shape[:1] != b.shape[1:] for one in (a, b)],
            "as many rows of A as columns of B: the rank",
        ),
        ([one for one in factors if 0 in one.shape], "a rank, inputs and outputs above 0"),
    ]
    for odd, expected in checks:
        if odd:
            named = ", ".join(f"{one.name} ({one.dtype}, {list(one.shape)})" for one in odd[:NUM_NAMED])
            raise ModelError(
                f"reading {file}: found {named} ({len(odd)} in all), expected {expected}; take the file from where the "
                "adapter was trained"
            )


def write_idle_adapter(source: Path, folder: Path) -> None:
    """Write a copy of an adapter whose every B is 0, so that it changes nothing; ModelError for damaged files."""
    tensors = read_tensors(source / WEIGHTS_FILE)
    folder.mkdir(parents=True)
    for name in (CONFIG_FILE, WEIGHTS_FILE):
        shutil.copyfile(source / name, folder / name)
    with (folder / WEIGHTS_FILE).open("r+b") as file:
        for tensor in tensors:
            # Zero bytes are 0 in every floating-point dtype; the header, with its offsets, stays as it is.
            if ".lora_B." in tensor.name:
                file.seek(tensor.start)
                file.write(bytes(tensor.end - tensor.start))
