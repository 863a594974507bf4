"""Adapter folder in PEFT's format: `adapter_model.safetensors`, `adapter_config.json` and the tokenizer.

Names in the file are those of the Transformers model, between `base_model.model.` and `.lora_A.weight`; DoRA's lengths
of rows are `.lora_magnitude_vector`, modules that learned as a whole have the names of their weights. Adapters on
parameters of a module have its name, with a `.base_layer` for each that is wrapped around them: the config lists these
parameters by their whole names, inmost first. A of experts is [experts × rank, in], B [out, rank × experts]. Numbers
that are not finite are neither written nor read, nor is anything that `merge` would leave out.
"""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Collection, Mapping
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stages.adapters.adapter import Adapter, of_unchanged_base
from stages.adapters.headers import CONFIG_FILE, PREFIX, WEIGHTS_FILE, read_headers
from stages.core.errors import ModelError
from stages.core.files import write_atomically
from stages.core.patterns import PatternError, Patterns
from stages.core.redaction import shortened
from stages.models.model_folder import follow_file_mask
from stages.models.weight_files import weight_paths

if TYPE_CHECKING:
    from torch import Tensor

MAGNITUDE = ".lora_magnitude_vector"
NUM_NAMED = 5
PATTERNS_LIMIT_S = 20.0
"""Time limit in seconds for matching all patterns of a config (EVA: one per layer) with all layer names."""
INNER = ".base_layer"
"""Suffix that PEFT adds to a module's name where several adapters wrap its parameters, once for each inner adapter."""
COMPANIONS = (
    "tokenizer", "chat_template", "special_tokens", "added_tokens", "vocab", "merges", "trained_on", "processor_config",
    "preprocessor_config", "video_preprocessor_config",
)  # fmt: skip
UNKNOWN = {"bias": "none", "lora_bias": False}
"""Fields of PEFT's config that merging does not support, each with the only value that merging accepts."""


def write_adapter(
    folder: Path,
    parameters: Mapping[str, Tensor],
    peft_config: Mapping[str, Any],
    base: Path,
    dtype: Any,
    initial: Mapping[str, Tensor] | None = None,
    merged: Adapter | None = None,
) -> list[ModelError]:
    """Write an adapter folder in PEFT's format: weights, config, and the base model's tokenizer.

    parameters: tensors on the CPU by name, such as `LAYER.lora_A.default.weight`. base: folder of the base model.
    initial: the factors that were taken out of the base at the start; merged: an adapter that was merged into it; then
    one adapter of the base, of the sum of the ranks, is written. Numbers too large for `dtype` are written in fp32, and
    returned as an error. Raises ModelError when a number is not finite.
    """
    import torch
    from safetensors.torch import save_file

    if broken := _not_finite(parameters):
        raise ModelError(f"writing the adapter: {_named(broken)} holds numbers that are not finite; train it again")
    config = {**peft_config, "base_model_name_or_path": base.parent.name, "inference_mode": True}
    if initial or merged:
        parameters, config = of_unchanged_base(parameters, config, initial or {}, merged)
    rounded = {name: weight.to(dtype).contiguous() for name, weight in parameters.items()}
    problems = []
    if too_large := _not_finite(rounded):
        # all of them, so that the file has one dtype
        rounded = {name: weight.to(torch.float32).contiguous() for name, weight in parameters.items()}
        problems.append(
            ModelError(
                f"writing the adapter: {_named(too_large)} holds numbers that are too large for "
                f"{str(dtype).removeprefix('torch.')}, so it was written in float32; set export_dtype to float32 or "
                "bfloat16"
            )
        )
    written = {f"{PREFIX}{_in_file(name)}": weight for name, weight in rounded.items()}
    folder.mkdir(parents=True, exist_ok=True)
    save_file(written, folder / WEIGHTS_FILE, metadata={"format": "pt"})
    # safetensors writes with mode 0600, which other users, such as a server's, cannot read.
    follow_file_mask(folder / WEIGHTS_FILE)
    # PEFT has made sets of lists; sorted, the same adapter gives the same bytes.
    ordered = {name: sorted(value) if isinstance(value, set) else value for name, value in sorted(config.items())}
    write_atomically(folder / CONFIG_FILE, json.dumps(ordered, indent=2) + "\n")
    copy_companions(base, folder)
    return problems


def copy_companions(source: Path, folder: Path) -> None:
    """Copy a model's or adapter's tokenizer, processor, chat template and `trained_on.json` to another folder."""
    for path in source.iterdir():
        if path.is_file() and path.name.startswith(COMPANIONS):
            shutil.copyfile(path, folder / path.name)


def read_adapter(folder: Path) -> Adapter:
    """Return the adapter in `folder`. Raises ModelError for damaged files and for content that cannot be merged."""
    config, tensors = _read(folder)
    layers = {name.removesuffix(".lora_A.weight") for name in tensors if name.endswith(".lora_A.weight")}
    magnitudes = {f"{layer}{MAGNITUDE}" for layer in layers if config.get("use_dora")}
    ends = tuple(config.get("modules_to_save") or ())
    saved = {name for name in tensors if ".lora_" not in name and any(one.endswith(ends) for one in _modules_of(name))}
    _check_names(folder, tensors, layers, magnitudes | saved)
    factors = {
        layer.removeprefix(PREFIX): (tensors[f"{layer}.lora_A.weight"], tensors[f"{layer}.lora_B.weight"])
        for layer in layers
    }
    parameters = _parameters(set(factors), config, folder)
    # The empty name is matched by no pattern: it gets the adapter's own rank and scaling.
    named = _ranks_and_scalings({"", *(parameters.get(layer, layer) for layer in factors)}, config, folder)
    sizes = {layer: named[parameters.get(layer, layer)] for layer in factors}
    plain = {layer: len(factors[layer][0]) for layer in set(factors) - set(parameters)}
    if odd := [f"{layer} ({rank})" for layer, rank in plain.items() if rank != sizes[layer][0]]:
        raise ModelError(
            f"{folder / WEIGHTS_FILE}: {', '.join(sorted(odd)[:NUM_NAMED])} has another rank than {CONFIG_FILE} gives "
            "it (`r`, `rank_pattern`), so that PEFT would not load it; take both files from where they were written"
        )
    for layer in parameters:
        factors[layer] = _each_expert(*factors[layer], sizes[layer][0])
    _, scaling = named[""]
    return Adapter(
        base=config.get("base_model_name_or_path") or "",
        factors=factors,
        scaling=scaling,
        is_transposed=bool(config.get("fan_in_fan_out")),
        magnitudes={name.removeprefix(PREFIX).removesuffix(MAGNITUDE): tensors[name] for name in magnitudes},
        saved={name.removeprefix(PREFIX): tensors[name] for name in saved},
        parameters=parameters,
        scalings={layer: own for layer, (_, own) in sizes.items() if own != scaling},
    )


def _modules_of(name: str) -> list[str]:
    """Return the names of all modules that contain a weight, from the outermost to the innermost."""
    return list(accumulate(name.split(".")[:-1], "{}.{}".format))


def _read(folder: Path) -> tuple[Mapping[str, Any], dict[str, Tensor]]:
    """Return PEFT's config and all tensors of an adapter. Raises ModelError unless it is a LoRA that can be merged."""
    from safetensors.torch import load_file

    config = read_headers(folder).config
    tensors = load_file(folder / WEIGHTS_FILE)
    odd = [f"{name}: {value}" for name, plain in UNKNOWN.items() if (value := config.get(name)) and value != plain]
    if config.get("peft_type") != "LORA" or odd:
        raise ModelError(
            f"the adapter in {folder} is a {config.get('peft_type')}{' with ' * bool(odd)}{', '.join(odd)}; expected a "
            "LoRA of linear layers"
        )
    if broken := _not_finite(tensors):
        raise ModelError(
            f"{folder / WEIGHTS_FILE}: {_named(broken)} holds numbers that are not finite, so that every answer would "
            "be lost; train it again"
        )
    return config, tensors


def _check_names(folder: Path, tensors: Mapping[str, Tensor], layers: set[str], others: set[str]) -> None:
    """Raise ModelError unless an adapter's file holds exactly A and B of each layer, and the tensors `others`."""
    factors = {f"{layer}.lora_{factor}.weight" for layer in layers for factor in "AB"}
    # ^: both what is missing and what is not expected
    unknown = sorted((factors | others) ^ set(tensors)) or [name for name in tensors if not name.startswith(PREFIX)]
    if not layers or unknown:
        raise ModelError(
            f"{folder / WEIGHTS_FILE}: {', '.join(unknown[:NUM_NAMED])} unexpected or without a partner; expected "
            f"`{PREFIX}LAYER.lora_A.weight` and `…lora_B.weight` of every adapted layer"
        )


def check_mergeable(weights: Collection[str], base: Path) -> None:
    """Raise ModelError unless each changed weight is in the files of `base` (some have other names than in memory)."""
    from safetensors import safe_open

    stored: set[str] = set()
    for path in weight_paths(base):
        with safe_open(path, framework="pt") as file:
            stored.update(file.keys())
    if lost := sorted(set(weights) - stored):
        raise ModelError(
            f"training an adapter on {base}: {len(lost)} of its weights have other names in the model's files "
            f"({', '.join(lost[:NUM_NAMED])}), so it could not be merged; save the model again with Transformers' "
            "`save_pretrained`, or name layers of the language model in adapter.target_modules"
        )


def check_weights(adapter: Adapter, base: Path) -> None:
    """Raise ModelError unless the headers in `base` have each changed weight in the same size."""
    from safetensors import safe_open

    shapes: dict[str, list[int]] = {}
    for path in weight_paths(base):
        with safe_open(path, framework="pt") as file:
            shapes |= {name: file.get_slice(name).get_shape() for name in adapter.weights & set(file.keys())}
    stored = {name: shapes.get(name) for name in sorted(adapter.weights)}
    odd = [f"{name} ({shape or 'missing'})" for name, shape in stored.items() if shape != adapter.shape_of(name)]
    if odd:
        raise ModelError(
            f"an adapter that changes {len(stored)} weights does not belong to {base}, where {len(odd)} of these are "
            f"missing or have another size: {', '.join(odd[:NUM_NAMED])}, expected {adapter.shape_of(min(stored))} and "
            "the like; name the model that it was trained on"
        )


def _parameters(layers: set[str], config: Mapping[str, Any], folder: Path) -> dict[str, str]:
    """Return the adapted parameters outside linear layers, such as stacked experts, by PEFT's layer name."""
    modules: dict[str, list[str]] = {}
    for name in config.get("target_parameters") or ():
        modules.setdefault(name.rpartition(".")[0], []).append(name)
    parameters: dict[str, str] = {}
    for module, names in modules.items():
        # inmost first: names [m.up, m.down] -> {m.base_layer: m.up, m: m.down}
        parameters |= zip((module + INNER * depth for depth in reversed(range(len(names)))), names, strict=True)
    if unknown := sorted(
        ({layer for layer in layers if layer.endswith(INNER)} - set(parameters)) | (set(parameters) - layers)
    ):
        raise ModelError(
            f"the adapter in {folder} has {', '.join(unknown[:NUM_NAMED])} in one of its files only; expected every "
            "adapted parameter in target_parameters, by its whole name"
        )
    return parameters


def _ranks_and_scalings(
    names: Collection[str], config: Mapping[str, Any], folder: Path
) -> dict[str, tuple[int, float]]:
    """Return LoRA rank and scaling of each layer or parameter, by name, from PEFT's config and its patterns."""
    ordered = sorted(names)
    with Patterns(PATTERNS_LIMIT_S) as patterns:

        def own(field: str, default: Any) -> list[Any]:
            values = config.get(field) or {}
            if not values:
                return [default] * len(ordered)
            try:
                # PEFT's own rule; PEFT itself would try an exponential pattern without a time limit.
                numbers = patterns.first_matches([rf"(.*\.)?({key})$" for key in values], ordered, "match")
            except (PatternError, TimeoutError) as error:
                reason = str(error) or f"takes over {PATTERNS_LIMIT_S:g} s, or too much memory"
                raise ModelError(
                    f"{folder / CONFIG_FILE}: a pattern of {field} cannot be compared with the names of layers: "
                    f"{shortened(reason, 200)}; expected names of layers, or short regular expressions"
                ) from error
            return [default if number is None else [*values.values()][number] for number in numbers]

        ranks, alphas = own("rank_pattern", config["r"]), own("alpha_pattern", config["lora_alpha"])
    # α / √rank for rsLoRA (Kalajdzievski 2023), else α / rank
    root = math.sqrt if config.get("use_rslora") else float
    return {name: (rank, alpha / root(rank)) for name, rank, alpha in zip(ordered, ranks, alphas, strict=True)}


def _each_expert(a: Tensor, b: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    """Return LoRA's factors by expert, A [experts, rank, in] and B [experts, out, rank]; others unchanged."""
    if len(a) == rank:  # no experts
        return a, b
    if len(a) % rank:
        raise ModelError(
            f"reading an adapter of experts: found {len(a)} rows of A, expected a multiple of the rank that "
            f"{CONFIG_FILE} gives, {rank}; take both files from where they were written"
        )
    # A [experts × rank, in]: the expert's number varies slowest; B [out, rank × experts]: fastest
    return a.unflatten(0, (-1, rank)), b.unflatten(1, (rank, -1)).permute(2, 0, 1)


def _in_file(parameter: str) -> str:
    return parameter.replace(f"{MAGNITUDE}.default.weight", MAGNITUDE).replace(".default.", ".")


def _not_finite(tensors: Mapping[str, Tensor]) -> list[str]:
    return sorted(name for name, tensor in tensors.items() if not tensor.isfinite().all())


def _named(names: list[str]) -> str:
    return f"{', '.join(names[:NUM_NAMED])} ({len(names)} in all)"
