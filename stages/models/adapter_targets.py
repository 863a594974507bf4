"""Choice of the layers that get an adapter, by names alone and with PEFT's rules; needs no torch.

Training asks with its model's names, the check of inputs with those in a file's headers, the planner with those that
follow from the shape. Names mean ends of module names, or a pattern of whole names, or all. In mixtures of experts that
PEFT knows, names of experts' linear layers and routers before Transformers 5 mean parameters of all experts of a layer.
"""

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Protocol

FORMER_NAMES: dict[str, dict[str, str]] = {
    "mixtral": {"gate": "gate.weight", "w1": "gate_up_proj", "w3": "gate_up_proj", "w2": "down_proj"},
    "qwen3_moe": {
        "gate": "gate.weight",
        "gate_proj": "gate_up_proj",
        "up_proj": "gate_up_proj",
        "down_proj": "down_proj",
    },
}
"""Endings of today's parameter names, by layer name from before Transformers 5, which PEFT accepts, by family."""
LAYER_NUMBER = re.compile(r".*?\.[^.]*\.(\d+)\.")
"""Pattern that finds a transformer layer's number in a module's name, as PEFT does; a later number is an expert's."""


class TargetOptions(Protocol):
    """Options of a recipe's `adapter:` that choose which layers are adapted."""

    @property
    def target_modules(self) -> str | tuple[str, ...]: ...
    @property
    def target_parameters(self) -> tuple[str, ...]: ...
    @property
    def exclude_modules(self) -> tuple[str, ...]: ...
    @property
    def layers_to_transform(self) -> tuple[int, ...] | None: ...
    @property
    def modules_to_save(self) -> tuple[str, ...]: ...


@dataclass(frozen=True)
class AdapterTargets:
    """Choice of the layers and parameters that get an adapter. former: today's names by former (`FORMER_NAMES`)."""

    options: TargetOptions
    former: Mapping[str, str]

    def has_layer(self, name: str) -> bool:
        """Return whether the linear layer of this name, which must not be the output head, gets an adapter."""
        targets = self.options.target_modules
        if self._leaves_out(name):
            return False
        if targets == "all-linear":
            return name.rpartition(".")[2] not in self.former
        if isinstance(targets, str):
            return re.fullmatch(targets, name) is not None
        return is_named(name, [target for target in targets if target.rpartition(".")[2] not in self.former])

    def ranks_of(self, parameter: str) -> int:
        """Return a parameter's LoRA rank over the recipe's; 0: none; for joined layers (gate, up) the ranks' sum."""
        if is_named(parameter, self.options.exclude_modules) or self._leaves_out(parameter.rpartition(".")[0]):
            return 0
        former = [old for old, end in self.former.items() if is_named(parameter, [end])]
        if any(self._has_former(old, parameter) for old in former):
            return len(former)
        return int(is_named(parameter, self.options.target_parameters))

    def _has_former(self, old: str, parameter: str) -> bool:
        """Return whether `target_modules` names `old`, a linear layer that newer models store in `parameter`."""
        targets = self.options.target_modules
        if targets == "all-linear":
            return True
        if isinstance(targets, str):
            # model.layers.0.mlp.experts.gate_up_proj was model.layers.0.mlp.experts.gate_proj (of an expert)
            return re.fullmatch(targets, parameter.removesuffix(self.former[old]) + old) is not None
        return any(target.rpartition(".")[2] == old for target in targets)

    def _leaves_out(self, module: str) -> bool:
        layers = self.options.layers_to_transform
        # The pattern wants a dot after the number.
        if layers is not None and layer_number(f"{module}.") not in layers:
            return True
        return is_named(module, self.options.exclude_modules) or is_saved(module, self.options.modules_to_save)


def is_named(name: str, ends: Collection[str]) -> bool:
    """Return whether a module's name is one of `ends`, or ends in one after a dot, as PEFT compares names."""
    return any(f".{name}".endswith(f".{end}") for end in ends)


def is_saved(name: str, modules_to_save: Collection[str]) -> bool:
    """Return whether `modules_to_save` names a module, or one that contains it, so that it is trained as a whole."""
    if not modules_to_save:
        return False
    parts = name.split(".")
    modules = (".".join(parts[: index + 1]) for index in range(len(parts)))
    return any(module.endswith(end) for module in modules for end in modules_to_save)


def layer_number(module: str) -> int | None:
    """Return the number of the transformer layer in a module's name; None for modules outside of layers."""
    found = LAYER_NUMBER.match(module)
    return int(found[1]) if found else None
