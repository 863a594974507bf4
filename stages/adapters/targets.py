"""Choice of the layers that get an adapter: layer names in a recipe become PEFT's target options.

PEFT itself silently leaves out what it does not find, as long as something else is found. Of the mixtures of experts
that it knows it takes names of experts' projections and routers, and `all-linear`, for these parameters in all layers:
which of them a recipe means is found here.
"""

import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from peft import LoraConfig
from peft.utils.transformers_weight_conversion import _MODEL_TO_CONVERSION_PATTERN as FAMILIES
from peft.utils.transformers_weight_conversion import _MOE_TARGET_MODULE_MAPPING as FORMER
from peft.utils.transformers_weight_conversion import convert_peft_config_for_transformers
from torch import nn
from transformers.pytorch_utils import Conv1D

from stages.adapters.config import AdapterConfig
from stages.core.errors import ModelError
from stages.models.adapter_targets import AdapterTargets, is_named, layer_number

NUM_NAMED = 5


@dataclass(frozen=True)
class PeftTargets:
    """Options of PEFT that choose adapted layers, adapted parameters and LoRA ranks.

    parameters: whole names; of those of one module, the first is the innermost when PEFT wraps them.
    """

    modules: list[str] | str
    parameters: list[str]
    ranks: dict[str, Any]
    alphas: dict[str, Any]


def peft_targets(causal_lm: Any, config: AdapterConfig, *, sees: bool = False) -> PeftTargets:
    """Return the PEFT options that select the layers, parameters and LoRA ranks of a recipe's adapter.

    sees: of a model with a tower of pictures, choose names of layers in the decoder alone: towers may have the same.
    Raises ModelError for names that the model, without an adapter yet, lacks, and options unfit for parameters.
    """
    known = _as_peft_knows_it(causal_lm, config)
    chosen = AdapterTargets(config, former_names(causal_lm))
    parameters = [name for name, _ in causal_lm.named_parameters() if chosen.ranks_of(name)]
    linear = [name for name, module in causal_lm.named_modules() if isinstance(module, nn.Linear | Conv1D)]
    if problems := "; ".join(_not_there(causal_lm, config, linear, known)):
        raise ModelError(f"putting an adapter on {type(causal_lm).__name__}: {problems}")
    if parameters and config.not_on_parameters:
        raise ModelError(
            f"adapter.target_modules is {config.target_modules!r}, which adapts {', '.join(parameters[:NUM_NAMED])}: "
            f"parameters, on which PEFT has no {' and '.join(config.not_on_parameters)}; remove that, or leave these "
            "out with exclude_modules"
        )
    modules = _modules(causal_lm, chosen, linear, known)
    if sees and not is_pattern(config):
        # Llama 4's decoder has the output head in it.
        decoder = {*causal_lm.get_decoder().modules()} - {causal_lm.get_output_embeddings()}
        modules = [name for name in linear if chosen.has_layer(name) and causal_lm.get_submodule(name) in decoder]
    return PeftTargets(modules, parameters, dict(known.rank_pattern or {}), dict(known.alpha_pattern or {}))


def is_pattern(config: AdapterConfig) -> bool:
    """Return whether the targets are a pattern of whole module names, which may be those of a tower of pictures."""
    return isinstance(config.target_modules, str) and config.target_modules != "all-linear"


def targets_of_ranks(ranks: Mapping[str, int], config: AdapterConfig) -> PeftTargets:
    """Return PEFT options for linear layers of different LoRA ranks (0: no adapter), but equal scaling."""
    own = {name: rank for name, rank in ranks.items() if rank not in (0, config.rank)}
    # alpha / rank is then the same in every layer.
    alphas = {name: config.alpha * rank / config.rank for name, rank in own.items()}
    return PeftTargets([name for name, rank in ranks.items() if rank], [], own, alphas)


def former_names(causal_lm: Any) -> Mapping[str, str]:
    """Return old names of expert and router layers that PEFT still accepts, with the endings of today's parameters."""
    return FORMER.get(FAMILIES.get(causal_lm.config.model_type, ""), {})


def _as_peft_knows_it(causal_lm: Any, config: AdapterConfig) -> LoraConfig:
    targets = config.target_modules
    known = LoraConfig(
        r=config.rank,
        lora_alpha=config.alpha,  # type: ignore[arg-type]  # a fraction serves as well
        target_modules=list(targets) if isinstance(targets, tuple) else targets,
        target_parameters=list(config.target_parameters) or None,
    )
    try:
        convert_peft_config_for_transformers(known, causal_lm, None)
    except ValueError as error:
        raise ModelError(f"adapter.target_modules is {targets!r}: {error}; name both, or neither") from error
    return known


def _modules(causal_lm: Any, chosen: AdapterTargets, linear: list[str], known: LoraConfig) -> list[str] | str:
    """Return the value of PEFT's `target_modules` for a recipe's adapter.

    `all-linear` and patterns become names where layers are chosen by number, which PEFT takes beside names only.
    Patterns also where PEFT knows the mixture of experts: it would apply a match in one layer to all layers.
    """
    targets, layers = chosen.options.target_modules, chosen.options.layers_to_transform
    names = None if isinstance(known.target_modules, str) else sorted(known.target_modules or ())
    if isinstance(targets, tuple):
        return names or []
    if layers is None and (names is None or targets == "all-linear"):
        return targets if names is None else names
    head = causal_lm.get_output_embeddings() if targets == "all-linear" else None
    return [name for name in linear if chosen.has_layer(name) and causal_lm.get_submodule(name) is not head]


def check_layers(adapted: Iterable[str], config: AdapterConfig) -> None:
    """Raise ModelError unless each layer number in `layers_to_transform` has a module with an adapter."""
    numbers = {layer_number(name) for name in adapted}
    if lost := [str(number) for number in config.layers_to_transform or () if number not in numbers]:
        raise ModelError(
            f"adapter.layers_to_transform names {', '.join(lost)}, in which target_modules {config.target_modules!r} "
            "matches nothing; leave these out"
        )


def _not_there(causal_lm: nn.Module, config: AdapterConfig, linear: list[str], known: LoraConfig) -> Iterator[str]:
    modules = [name for name, _ in causal_lm.named_modules()]
    parameters = {name: one.ndim for name, one in causal_lm.named_parameters()}
    called = f"linear layers are called {', '.join(_ends(linear))}"
    targets = config.target_modules
    if isinstance(targets, tuple):
        if lost := _unmatched(sorted(known.target_modules or ()), modules):
            yield f"adapter.target_modules names {lost}, which it does not have; its {called}"
    elif isinstance(known.target_modules, str) and not any(
        targets == "all-linear" or re.fullmatch(targets, name) for name in modules
    ):
        example = f", as in {linear[0]}" if linear else ""
        yield f"the pattern {targets!r} of adapter.target_modules matches none of its modules; {called}{example}"
    if lost := _unmatched(config.target_parameters, parameters):
        stacked = sorted({re.sub(r".*\.\d+\.", "", name) for name, num_dims in parameters.items() if num_dims > 2})
        yield (
            f"adapter.target_parameters names {lost}, which it does not have; its parameters of several experts are "
            f"called {', '.join(stacked) or 'nothing: it has none'}"
        )
    if lost := _unmatched(config.exclude_modules, [*modules, *parameters]):
        yield f"adapter.exclude_modules names {lost}, which it does not have; its {called}"
    if lost := _unmatched(config.modules_to_save, modules):
        yield (
            f"adapter.modules_to_save names {lost}, which {type(causal_lm).__name__} does not have; its modules are "
            f"called {', '.join(_ends(modules))}"
        )
    numbers = {number for name in modules if (number := layer_number(f"{name}.")) is not None}
    if lost := ", ".join(str(one) for one in config.layers_to_transform or () if one not in numbers):
        yield f"adapter.layers_to_transform names {lost}; its layers are 0 to {max(numbers, default=0)}"


def _unmatched(ends: Collection[str], names: Collection[str]) -> str:
    """Return names, or endings after a dot, that match no module, joined for an error message."""
    return ", ".join(end for end in ends if not any(is_named(name, [end]) for name in names))


def _ends(names: Iterable[str]) -> list[str]:
    return sorted({end for name in names if (end := name.rpartition(".")[2]) and not end.isdigit()})
