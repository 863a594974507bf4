"""Linear layers of a Transformers model, by module name and by name in files, and which of them are quantized.

The names differ: Transformers renames modules as it reads a file, and merges a layer's experts into one tensor, which a
quantizer takes apart again. Servers and Transformers read a quantized layer by its name in files.
"""

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, WeightRenaming, WeightTransform, revert_weight_conversion
from transformers.pytorch_utils import Conv1D

from stages.core.errors import ModelError, RecipeError
from stages.engines.export import Shapes, own_weight_shapes, weight_shapes
from stages.engines.fsdp.sources import ModelFiles
from stages.models.carried_weights import OLD_BUFFERS, carried_names, mtp_names
from stages.models.linear_layers import EXPERTS, Projection, matches
from stages.models.loading import build_model, head_of, load_config
from stages.models.parts import parts_of
from stages.models.weight_files import WEIGHTS_INDEX, read_tensors, weight_paths
from stages.serving.engine import Quantization

EXPERT_SOURCE = re.compile(r"experts\.\*\.(\w+)\.weight$")
"""Pattern of the weight name of one expert layer in model files, as Transformers' weight conversions write it."""
MERGED_EXPERTS = {"gate_up_proj": ("gate_proj", "up_proj"), "up_proj": ("up_proj",), "down_proj": ("down_proj",)}
"""Layers of an expert (such as `gate_proj`) that Transformers joins into one tensor, in order, by the tensor's name."""
NUM_NAMED = 3


def build_without_weights(folder: Path, *, trust_remote_code: bool) -> PreTrainedModel:
    """Build a model on the meta device, to look at its layers; raise ModelError if Transformers does not know it."""
    try:
        config = load_config(folder, trust_remote_code=trust_remote_code)
        model: PreTrainedModel = build_model(config, head=head_of(config), trust_remote_code=trust_remote_code)
        # As of a model that was loaded: without them, names in files of older versions would be its own in none.
        model._weight_conversions = ModelFiles(folder, model).conversions
    except Exception as error:
        raise ModelError(
            f"Transformers cannot build the model that {folder / 'config.json'} describes: "
            f"{type(error).__name__}: {error}; expected a language model that it knows, of text alone or of text and "
            "media"
        ) from error
    return model


def linear_layers(model: PreTrainedModel) -> dict[str, Projection]:
    """Return linear layers (sizes, name in files) by module name, each expert's apart unless files hold them merged."""
    linear = {name: module for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    layers = {name: _stored(model, name, *module.weight.shape) for name, module in linear.items()}
    stored_as = expert_names(model)
    for name, experts in _expert_modules(model) if stored_as else ():
        num_experts, hidden_size, inner_size = experts.down_proj.shape  # [experts, outputs, inputs]
        for part in stored_as:
            shape = (hidden_size, inner_size) if part == "down_proj" else (inner_size, hidden_size)
            for number in range(num_experts):
                expert = _stored(model, f"{name}.{number}", *shape)
                layers[f"{name}.{number}.{part}"] = Projection(f"{expert.name}.{stored_as[part]}", *shape)
    return layers


def carried_by(model: PreTrainedModel, folder: Path) -> Shapes:
    """Return weights in a model's folder, by name, that are copied as they are, since the model does not have them.

    Transformers' patterns alone do not tell: they name layers by number, and a larger model has that layer itself.
    Buffers of old files are left out: no one reads them.
    """
    stored, own = weight_shapes(folder), own_weight_shapes(model, folder)
    names = carried_names(model, stored) - own.keys()
    return {name: stored[name] for name in names if not re.search(OLD_BUFFERS, name)}


def check_nothing_lost(model: PreTrainedModel, folder: Path) -> None:
    """Raise ModelError for weights in a folder that no quantizer loads and no one copies: they would be lost."""
    listed = weight_paths(folder)
    unlisted = {
        tensor.name: path.name
        for path in sorted(folder.glob("*.safetensors"))
        if path not in listed
        for tensor in read_tensors(path)
    }
    if mtp := sorted(mtp_names(unlisted)):
        raise ModelError(
            f"{folder} holds {len(mtp)} weights of multi-token prediction in {unlisted[mtp[0]]} "
            f"({', '.join(mtp[:NUM_NAMED])}), which {WEIGHTS_INDEX} does not list, so they would be lost; list them "
            "there, or remove that file"
        )
    stored = weight_shapes(folder)
    known = own_weight_shapes(model, folder).keys() | (model.all_tied_weights_keys or {}).keys()
    if unknown := sorted(stored.keys() - known - carried_names(model, stored)):
        raise ModelError(
            f"{folder} holds {len(unknown)} weights that {type(model).__name__} does not have with this config.json "
            f"({', '.join(unknown[:NUM_NAMED])}), so a quantized model would lack them; remove them from the files, or "
            "correct config.json"
        )


def beside_text(model: PreTrainedModel, folder: Path) -> dict[str, Shapes]:
    """Return the weights of a model that sees which are not of its language part, by part: shapes by name in files."""
    if head_of(model.config) == "tokens":
        return {}
    parts = {part: named.keys() for part, named in parts_of(model).items() if part != "language_model"}
    return {part: own_weight_shapes(model, folder, names) for part, names in parts.items()}


def ignored_by_servers(shapes: Mapping[str, tuple[int, ...]]) -> set[str]:
    """Return names, or patterns, by which a server knows that weights of these names and shapes are not quantized."""
    matrices = {name.removesuffix(".weight") for name, shape in shapes.items() if len(shape) == 2}
    merged = {name.rpartition(".")[0] for name, shape in shapes.items() if len(shape) == 3}  # [experts, out, in]
    return matrices | {rf"re:{re.escape(name)}\..*" for name in merged}


def expert_names(model: PreTrainedModel) -> dict[str, str]:
    """Return files' names of an expert's `gate_proj`, `up_proj`, `down_proj` (Mixtral: `w1`…); {} if merged or none."""
    names: dict[str, str] = {}
    for conversion in weight_conversions(model):
        if merges_experts(conversion):
            parts = MERGED_EXPERTS[conversion.target_patterns[0].rpartition(".")[2]]
            sources = [EXPERT_SOURCE.search(source) for source in conversion.source_patterns]
            names |= {part: source[1] for part, source in zip(parts, sources, strict=True) if source}
    return names


def merges_experts(conversion: WeightTransform) -> bool:
    """Return whether one of Transformers' weight conversions merges the experts of a layer into one tensor."""
    merged = conversion.target_patterns[0].rpartition(".")[2]
    separate = all(EXPERT_SOURCE.search(source) for source in conversion.source_patterns)
    return isinstance(conversion, WeightConverter) and merged in MERGED_EXPERTS and separate


def name_experts_as_stored(model: PreTrainedModel) -> None:
    """Make `save_pretrained` write experts under the original files' names; call it before they are unmerged."""
    # From the names in files to those of modules, as for loading: saving reverts them.
    renamings = [
        WeightRenaming(rf"\.experts\.(\d+)\.{stored}\.", rf".experts.\1.{name}.")
        for name, stored in expert_names(model).items()
        if name != stored
    ]
    others = [conversion for conversion in weight_conversions(model) if not merges_experts(conversion)]
    model._weight_conversions = [*others, *renamings]


def weight_conversions(model: PreTrainedModel) -> list[WeightTransform]:
    """Return the conversions by which Transformers renames and merges weights when it loads this model."""
    found: list[WeightTransform] | None = getattr(model, "_weight_conversions", None)
    return get_model_conversion_mapping(model, add_legacy=False) if found is None else found


def quantized_layers(model: PreTrainedModel, quantization: Quantization) -> dict[str, Projection]:
    """Return the layers to quantize by module name: the text part's linear ones but routers and the recipe's `ignore`.

    Rows of text calibrate nothing of a tower for images or sound, whose layers also are few beside the text's.
    """
    ignore = (*quantization.ignore, *_routers(model), *_beside_text(model))
    if "lm_head" in ignore:
        ignore = (*ignore, *_output_layer(model))
    layers = linear_layers(model)
    # A pattern may match the module's name or the name in files.
    return {name: layer for name, layer in layers.items() if not matches(name, ignore) | matches(layer.name, ignore)}


def check_quantizable(model: PreTrainedModel, quantization: Quantization, patterns: tuple[str, ...]) -> None:
    """Raise ModelError or RecipeError if layers cannot be quantized as asked. patterns: `ignore` of the recipe."""
    _check_patterns(model, patterns)
    layers = quantized_layers(model, quantization)
    if unpacked := [*_transposed_layers(model, quantization), *_derived_layers(model, layers)]:
        classes = sorted({type(model.get_submodule(name)).__name__ for name in unpacked})
        raise ModelError(
            f"{type(model).__name__} cannot be quantized: {len(unpacked)} of its layers ({_some(unpacked)}) are of the "
            f"class {', '.join(classes)}, and quantizers and servers take torch's own Linear alone; expected a model "
            "of another family, or layers like these in `ignore`"
        )
    _check_experts(model, quantization, layers)
    if not layers:
        raise RecipeError(
            f"there is nothing to quantize: `ignore` matches all {len(linear_layers(model))} linear layers of the model"
        )
    tied = {name.removesuffix(".weight") for name in getattr(model, "all_tied_weights_keys", None) or {}}
    if shared := layers.keys() & tied & {*_output_layer(model)}:
        raise RecipeError(
            f"{_some(sorted(shared))} has the weights of the embedding, so it cannot be quantized alone; add it to "
            "`ignore`"
        )


def _transposed_layers(model: PreTrainedModel, quantization: Quantization) -> list[str]:
    """Return layers of Transformers' class Conv1D (as in GPT-2), which llm-compressor silently skips."""
    found = [name for name, module in model.named_modules() if isinstance(module, Conv1D)]
    return [name for name in found if not matches(name, quantization.ignore)]


def _derived_layers(model: PreTrainedModel, layers: dict[str, Projection]) -> list[str]:
    """Return layers of subclasses of Linear, such as Falcon's, which compressed-tensors cannot store quantized."""
    modules = dict(model.named_modules())
    return [name for name in layers if name in modules and type(modules[name]) is not nn.Linear]


def _check_patterns(model: PreTrainedModel, patterns: tuple[str, ...]) -> None:
    """Raise RecipeError if a pattern in `ignore` matches no module; `lm_head` may be missing in the model."""
    layers = linear_layers(model)
    names = (
        {name for name, _ in (*model.named_modules(), *model.named_parameters())}
        | set(layers)
        | {layer.name for layer in layers.values()}
    )
    for pattern in patterns:
        if pattern != "lm_head" and not any(matches(name, (pattern,)) for name in names):
            raise RecipeError(
                f"`ignore`: {pattern} matches no module of {type(model).__name__}; its linear layers are named like "
                f"{_some(sorted(layers))}, and a pattern begins with `re:`"
            )


def _check_experts(model: PreTrainedModel, quantization: Quantization, layers: dict[str, Projection]) -> None:
    """Raise an error if Transformers could not load the model's experts again once they are quantized."""
    experts = [name for name, _ in _expert_modules(model)]
    merged = not expert_names(model)
    if merged and (named := [name for name in experts if not matches(f"{name}.", quantization.ignore)]):
        raise ModelError(
            f"{type(model).__name__} cannot be quantized whole: its files hold all experts of a layer in one tensor "
            f"({_some(named)}), and Transformers reads no quantized ones of that form; "
            rf"to quantize the other layers, add '{EXPERTS}' to `ignore`"
        )
    left_out = [name for name in experts if not any(layer.startswith(f"{name}.") for layer in layers)]
    if not merged and left_out and quantization.weights != "fp8":
        raise RecipeError(
            f"`ignore` leaves out the experts of {type(model).__name__} ({_some(left_out)}), and beside layers of "
            f"{quantization.method} Transformers reads no unquantized experts; choose method fp8, or quantize them too"
        )


def _expert_modules(model: PreTrainedModel) -> list[tuple[str, nn.Module]]:
    """Return name and module of each module that holds the experts of a layer in three-dimensional tensors."""
    if not any(parameter.ndim == 3 for parameter in model.parameters()):  # [experts, outputs, inputs]
        return []
    from llmcompressor.modeling.moe.linearize import get_non_linearized_moes  # takes seconds to import

    found: list[tuple[str, nn.Module]] = get_non_linearized_moes(model)
    return found


def _routers(model: PreTrainedModel) -> Iterator[str]:
    """Yield the names of routers, which differ by architecture: linear layers beside experts, an output for each."""
    for name, experts in _expert_modules(model):
        beside, num_experts = name.rpartition(".")[0], len(experts.down_proj)
        for child, module in model.get_submodule(beside).named_modules(prefix=beside):
            if isinstance(module, nn.Linear) and module.out_features == num_experts:
                yield child


def _beside_text(model: PreTrainedModel) -> Iterator[str]:
    """Yield the names of linear layers outside of the text part, in towers for images or sound and behind them."""
    text = {*model.get_decoder().modules(), model.get_output_embeddings()}
    return (name for name, module in model.named_modules() if isinstance(module, nn.Linear) and module not in text)


def _stored(model: PreTrainedModel, name: str, output_size: int, input_size: int) -> Projection:
    """Return a linear layer's sizes, and the name under which model files store its weight."""
    # Empty and without memory: only the name matters.
    (stored,) = revert_weight_conversion(model, {f"{name}.weight": torch.empty(0, device="meta")})
    return Projection(stored.removesuffix(".weight"), output_size, input_size)


def _output_layer(model: Any) -> Iterator[str]:
    output = model.get_output_embeddings()
    return (name for name, module in model.named_modules() if module is output and isinstance(module, nn.Linear))


def _some(names: list[str]) -> str:
    return ", ".join([*names[:NUM_NAMED], *(["…"] if names[NUM_NAMED:] else [])])
