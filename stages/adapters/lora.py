"""LoRA on a Transformers model by PEFT: the base model is frozen, and A and B of the adapted layers are trained.

PEFT decides where they go: `all-linear`and names of experts' projections mean the parameters in which a mixture of
experts has all experts of a layer. Refused by name: targets that match nothing (`targets`), a rank that a layer does
not have, adapters of embeddings and of the head (servers leave those out silently), layers whose weights PEFT cannot
merge again.
"""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, inject_adapter_in_model
from peft.tuners.lora import Linear as LoraLinear
from peft.tuners.lora.layer import ParamWrapper
from peft.utils import ModulesToSaveWrapper
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from stages.adapters.adapter import Adapter
from stages.adapters.config import AdapterConfig, BasePrecision
from stages.adapters.effect import stored_names
from stages.adapters.files import INNER, NUM_NAMED, read_adapter
from stages.adapters.quantized import quantize_base
from stages.adapters.targets import PeftTargets, check_layers, is_pattern, peft_targets, targets_of_ranks
from stages.core.errors import ModelError
from stages.models.loaded_weights import dtype_of_weights
from stages.models.start_up import hide_torchao_from_adapters

ADAPTER_NAME = "default"
"""Name that PEFT gives to an adapter without a name; it is part of the adapter's parameter names."""
MAX_NAMED = 12


def add_adapter(
    causal_lm: Any,
    config: AdapterConfig,
    seed: int,
    *,
    has_weights: bool = True,
    directions: Mapping[str, Tensor] | None = None,
    sees: bool = False,
) -> LoraConfig:
    """Put a LoRA adapter on `causal_lm` in place, freeze all other weights, and return PEFT's config of the adapter.

    A is drawn with `seed`, B is 0: the adapted model is the base until it learns. With another `init` they come of the
    base's weights, which change so that the sum is the base; without weights (`has_weights=False`: those of rank 0 come
    later) they are left at the default. directions: A [rank, inputs] by layer, where each has a rank of its own (rank
    0: no adapter). sees: see `peft_targets`. Raises ModelError.
    """
    is_transposed = any(isinstance(module, Conv1D) for module in causal_lm.modules())
    if is_transposed and config.init == "olora":
        raise ModelError(f"adapter.init is olora, which PEFT gets wrong for {type(causal_lm).__name__}; choose pissa")
    targets = peft_targets(causal_lm, config, sees=sees)
    if directions is not None:
        targets = targets_of_ranks({name: len(one) for name, one in directions.items()}, config)
    lora = _lora_config(config, targets, is_transposed=is_transposed, has_weights=has_weights)
    hide_torchao_from_adapters()
    # The caller's random state is left as it was.
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        try:
            inject_adapter_in_model(lora, causal_lm, ADAPTER_NAME)
        except ValueError as error:
            raise ModelError(
                f"putting an adapter on {config.target_modules!r}: {str(error).partition('. ')[0]}; name linear layers "
                "between the embedding and the head"
            ) from error
    # inmost first, as `files.py` reads them; PEFT has made a set of them
    lora.target_parameters = targets.parameters or None
    for name, direction in (directions or {}).items():
        if len(direction):
            causal_lm.get_submodule(name).lora_A[ADAPTER_NAME].weight.data.copy_(direction)
    _check(causal_lm, config, may_be_in_towers=sees and is_pattern(config))
    _let_saved_modules_learn(causal_lm, config)
    return lora


def read_start(folder: Path, base: Path) -> Adapter:
    """Return the adapter in `folder`, to train it further; ModelError if its base model is not `base`."""
    adapter = read_adapter(folder)
    if adapter.base != base.parent.name:
        raise ModelError(
            f"training on from {folder.parent.name}: it is an adapter of {adapter.base or 'no artifact'}, not of "
            f"{base.parent.name}"
        )
    return adapter


def load_trained_adapter(causal_lm: Any, adapter: Adapter) -> None:
    """Copy a trained adapter into the model's LoRA parameters; ModelError for other layers or sizes."""
    given = _parameters(adapter)
    learning = {name: one for name, one in causal_lm.named_parameters() if one.requires_grad}
    # in one of the two only
    odd = set(given) ^ set(learning)
    odd |= {name for name in set(given) & set(learning) if given[name].shape != learning[name].shape}
    if odd:
        raise ModelError(
            f"going on with an adapter: {', '.join(sorted(odd)[:NUM_NAMED])} is not in both it and what `adapter:` "
            "describes, or has another size there; give rank and target_modules that it was trained with, or say "
            "`stack: merge`"
        )
    for layer, module in adapted_layers(causal_lm).items():
        scaling, given_scaling = module.scaling[ADAPTER_NAME], adapter.scaling_of(layer)
        if not math.isclose(scaling, given_scaling):
            raise ModelError(
                f"going on with an adapter that counts {given_scaling:g} times: `adapter:` says {scaling:g} (alpha / "
                f"rank, or alpha / √rank with use_rslora) on {layer}; give those that it was trained with, or say "
                "`stack: merge`"
            )
    for name, parameter in learning.items():
        parameter.data.copy_(given[name])


def merge_into(causal_lm: Any, adapter: Adapter) -> None:
    """Merge an adapter into the model's weights, as the merge stage does. Raises ModelError for missing weights."""
    if adapter.parameters:
        raise ModelError(
            f"merging an adapter, to stack another on it: it changes {next(iter(adapter.parameters.values()))}, and "
            "adapters of parameters are not added up to one of the base; merge it by a stage of `kind: merge`"
        )
    named = dict(causal_lm.named_parameters())
    if lost := sorted(adapter.weights - set(named)):
        raise ModelError(f"merging an adapter: the model has no {', '.join(lost[:NUM_NAMED])}; it is another one's")
    for name in adapter.weights:
        named[name].data = adapter.merged(name, named[name].data).to(named[name].dtype)


def _parameters(adapter: Adapter) -> dict[str, Tensor]:
    """Return the adapter's tensors by the names that they have in a model adapted by PEFT."""
    parameters = dict(adapter.saved)
    for layer, (a, b) in adapter.factors.items():
        if a.ndim > 2:  # of experts, as PEFT has them: A [experts × rank, in], B [out, rank × experts]
            a, b = a.flatten(0, 1), b.permute(1, 2, 0).flatten(1)
        parameters[f"{layer}.lora_A.{ADAPTER_NAME}.weight"] = a
        parameters[f"{layer}.lora_B.{ADAPTER_NAME}.weight"] = b
    for layer, magnitude in adapter.magnitudes.items():
        parameters[f"{layer}.lora_magnitude_vector.{ADAPTER_NAME}.weight"] = magnitude
    return parameters


def store_base(causal_lm: Any, precision: BasePrecision | None, compute_dtype: torch.dtype) -> None:
    """Convert frozen weights to `precision`; by default to the dtype of computation, since layers see no more digits.

    What nf4 and int8 are not for (embedding, head, norms) is kept as it is computed. Raises ModelError.
    """
    if precision in ("nf4", "int8"):
        quantize_base(causal_lm, precision)
    dtype_of = dtype_of_weights(
        causal_lm, {"bf16": torch.bfloat16, "fp32": torch.float32}.get(precision or "", compute_dtype)
    )
    for name, parameter in causal_lm.named_parameters():
        # The codes and scales of nf4 and int8 are bytes, and stay as they are.
        if not parameter.requires_grad and parameter.is_floating_point():
            parameter.data = parameter.data.to(dtype_of(name))


def adapted_layers(causal_lm: nn.Module) -> dict[str, LoraLinear | ParamWrapper]:
    """Return all modules that PEFT has adapted, linear layers or holders of adapted parameters, by name."""
    found = causal_lm.named_modules()
    return {name: module for name, module in found if isinstance(module, (LoraLinear, ParamWrapper))}


def adapted_parameters(causal_lm: nn.Module) -> dict[str, str]:
    """Return the names of adapted parameters outside linear layers, as the base model has them, by adapted layer."""
    return {
        name: f"{name.replace(INNER, '')}.{module.parameter_name}"
        for name, module in adapted_layers(causal_lm).items()
        if isinstance(module, ParamWrapper)
    }


def num_experts_of_factors(causal_lm: nn.Module) -> dict[str, int]:
    """Return the number of experts in each LoRA factor that holds all experts of a layer, by factor name."""
    wrapped = {name: one for name, one in adapted_layers(causal_lm).items() if isinstance(one, ParamWrapper)}
    return {
        f"{name}.lora_{factor}.{ADAPTER_NAME}.weight": module.num_experts
        for name, module in wrapped.items()
        for factor in "AB"
        if module.num_experts > 1
    }


def changed_weights(causal_lm: nn.Module) -> list[str]:
    """Return the names of all weights that merging changes, as in the model's files."""
    learning = {name: one for name, one in causal_lm.named_parameters() if one.requires_grad}
    layers, parameters = adapted_layers(causal_lm), adapted_parameters(causal_lm)
    changed = {parameters.get(layer, f"{layer}.weight"): _weight_of(module) for layer, module in layers.items()}
    changed |= {name: one for name, one in learning.items() if ".lora_" not in name}
    return [
        in_files for name, weight in changed.items() for in_files in stored_names(causal_lm, name, tuple(weight.shape))
    ]


def factors_of(causal_lm: nn.Module) -> dict[str, Tensor]:
    """Return copies of all LoRA factors A and B of an adapted model, by parameter name."""
    named = causal_lm.named_parameters()
    return {name: one.detach().clone() for name, one in named if ".lora_A." in name or ".lora_B." in name}


def _lora_config(config: AdapterConfig, targets: PeftTargets, *, is_transposed: bool, has_weights: bool) -> LoraConfig:
    # PEFT takes layer numbers beside names only; of a pattern, `targets` has made names of those layers already.
    layers = config.layers_to_transform if isinstance(config.target_modules, tuple) else None
    return LoraConfig(
        r=config.rank,
        lora_alpha=config.alpha,  # type: ignore[arg-type]  # a fraction serves as well
        lora_dropout=config.dropout,
        target_modules=targets.modules,
        target_parameters=targets.parameters or None,
        rank_pattern=targets.ranks,
        alpha_pattern=targets.alphas,
        exclude_modules=list(config.exclude_modules) or None,
        layers_to_transform=list(layers) if layers else None,
        use_rslora=config.use_rslora,
        use_dora=config.use_dora,
        # True: B is 0. The other inits decompose the base's weights, which only a process that has read them can.
        init_lora_weights=config.init if config.changes_base and has_weights else True,  # type: ignore[arg-type]
        modules_to_save=list(config.modules_to_save) or None,
        fan_in_fan_out=is_transposed,
        task_type="CAUSAL_LM",
    )


def _let_saved_modules_learn(causal_lm: Any, config: AdapterConfig) -> None:
    """Train the modules in `modules_to_save` in place. PEFT would train a copy of each, and write the same file."""
    wrapped = {name: one for name, one in causal_lm.named_modules() if isinstance(one, ModulesToSaveWrapper)}
    edges = [causal_lm.get_input_embeddings(), causal_lm.get_output_embeddings()]
    # PEFT's wrapper keeps the module itself as `original_module`.
    is_tied = len({id(getattr(edge, "original_module", edge).weight) for edge in edges}) == 1
    for name, wrapper in wrapped.items():
        if is_tied and wrapper in edges:
            raise ModelError(
                f"adapter.modules_to_save names {name}, but embedding and head of this model are one weight, which "
                "PEFT's file would hold as two; leave it out"
            )
        causal_lm.set_submodule(name, wrapper.original_module.requires_grad_(True))


def _check(causal_lm: Any, config: AdapterConfig, *, may_be_in_towers: bool) -> None:
    layers = adapted_layers(causal_lm)
    check_layers(layers, config)
    odd = [name for name, module in causal_lm.named_modules() if hasattr(module, "lora_A") and name not in layers]
    edges = (causal_lm.get_input_embeddings(), causal_lm.get_output_embeddings())
    odd += [name for name, module in layers.items() if any(module is edge for edge in edges)]
    # outside the decoder: the towers of a multimodal model, and the head
    if not may_be_in_towers:
        decoder = {id(module) for module in causal_lm.get_decoder().modules()}
        odd += [name for name, module in layers.items() if id(module) not in decoder]
    if odd := list(dict.fromkeys(odd)):
        raise ModelError(
            f"adapter.target_modules is {config.target_modules!r}, which adapts {', '.join(odd[:MAX_NAMED])}: only "
            "linear layers between the embedding and the head can be adapted; leave these out with exclude_modules"
        )
    if odd := [name for name, module in layers.items() if not _is_product(module.get_base_layer())]:
        raise ModelError(
            f"adapter.target_modules is {config.target_modules!r}, which adapts {', '.join(odd[:MAX_NAMED])}, of class "
            f"{type(layers[odd[0]].get_base_layer()).__name__}, which gives something else than the product with its "
            "weight; leave these out with exclude_modules"
        )
    routers = {name for name, module in layers.items() if isinstance(module, ParamWrapper) and module.num_experts == 1}
    # Of stacked experts [experts, ., .] the last two. A router's width is the number of experts, often below the rank.
    widths = {name: min(_weight_of(layer).shape[-2:]) for name, layer in layers.items() if name not in routers}
    if too_narrow := [f"{name} ({width})" for name, width in widths.items() if width < config.highest_rank]:
        times = f" × eva_rho {config.eva_rho:g}" * (config.init == "eva")
        raise ModelError(
            f"adapter.rank is {config.rank}{times}, more than the width of {', '.join(too_narrow[:MAX_NAMED])}; lower "
            "it, or leave these layers out with exclude_modules"
        )


def _is_product(layer: nn.Module) -> bool:
    """Return whether a layer's output is one tensor, to which an adapter's can be added (Llama 4's router: not)."""
    if not isinstance(layer, nn.Linear) or type(layer).forward is nn.Linear.forward:
        return True
    with torch.no_grad():
        # tried out with one row of zeros: the code of the class does not tell
        return isinstance(layer(layer.weight.new_zeros(1, layer.in_features)), Tensor)


def _weight_of(layer: LoraLinear | ParamWrapper) -> Tensor:
    return layer.get_param() if isinstance(layer, ParamWrapper) else layer.get_base_layer().weight
