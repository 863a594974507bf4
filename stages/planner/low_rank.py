"""The fields of an adapter that decide memory or time, and what of a model they put it on, by PEFT's rules. Pure.

By names: ends of them, a pattern of whole ones, or all. Of the mixtures of experts that PEFT knows, the names that
experts' projections and routers had as linear layers mean the parameters that they are in Transformers now.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

from stages.models.linear_layers import StackedParameter

FORMER_NAMES = {
    "mixtral": {"gate": "mlp.gate.weight", "w1": "mlp.experts.gate_up_proj", "w3": "mlp.experts.gate_up_proj",
                "w2": "mlp.experts.down_proj"},
    "qwen3_moe": {"gate": "mlp.gate.weight", "gate_proj": "mlp.experts.gate_up_proj",
                  "up_proj": "mlp.experts.gate_up_proj", "down_proj": "mlp.experts.down_proj"},
}  # fmt: skip
"""Family → name of a linear layer, as PEFT still takes it → end of the parameter's name."""


@dataclass(frozen=True)
class LowRank:
    """The fields of a recipe's `adapter:` that decide memory or time, meant as there."""

    rank: int
    target_modules: str | tuple[str, ...] = "all-linear"
    target_parameters: tuple[str, ...] = ()
    exclude_modules: tuple[str, ...] = ()
    layers_to_transform: tuple[int, ...] | None = None
    modules_to_save: tuple[str, ...] = ()
    use_dora: bool = False
    dropout: float = 0.0
    base_precision: Literal["bf16", "fp32", "nf4", "int8"] | None = None

    @property
    def is_quantized(self) -> bool:
        """Whether frozen linear layers are kept as bytes of which weights are made when they are used."""
        return self.base_precision in ("nf4", "int8")

    def targets(self, name: str, layer: int, family: str = "llama") -> bool:
        """Whether PEFT adapts the linear layer of this name."""
        if _ends(name, self.exclude_modules) or self.saves(name) or not self._transforms(layer):
            return False
        former = FORMER_NAMES.get(family, {})
        if self.target_modules == "all-linear":
            return name.rpartition(".")[2] not in former
        if isinstance(self.target_modules, str):
            return re.fullmatch(self.target_modules, name) is not None
        return _ends(name, tuple(one for one in self.target_modules if one.rpartition(".")[2] not in former))

    def rank_on(self, parameter: StackedParameter, layer: int, family: str) -> int:
        """Rank of the adapter that PEFT puts on this parameter: of names that were several layers' the sum; 0: none."""
        module = parameter.name.rpartition(".")[0]
        excluded = _ends(parameter.name, self.exclude_modules) or _ends(module, self.exclude_modules)
        if excluded or self.saves(module) or not self._transforms(layer):
            return 0
        former = [old for old, end in FORMER_NAMES.get(family, {}).items() if _ends(parameter.name, (end,))]
        if former and all(self._names_former(old, parameter, module) for old in former):
            return self.rank * len(former)
        return self.rank if _ends(parameter.name, self.target_parameters) else 0

    def saves(self, name: str) -> bool:
        """Whether the module of this name learns as a whole, by itself or in one that does."""
        parts = name.split(".")
        modules = (".".join(parts[: index + 1]) for index in range(len(parts)))
        return any(module.endswith(end) for module in modules for end in self.modules_to_save)

    def _transforms(self, layer: int) -> bool:
        return self.layers_to_transform is None or layer in self.layers_to_transform

    def _names_former(self, old: str, parameter: StackedParameter, module: str) -> bool:
        """Whether the linear layer `old`, of which the parameter is made, is named."""
        if self.target_modules == "all-linear":
            return True
        if isinstance(self.target_modules, str):
            whole = module if parameter.is_router else f"{module}.{old}"
            return re.fullmatch(self.target_modules, whole) is not None
        return any(one.rpartition(".")[2] == old for one in self.target_modules)


def _ends(name: str, ends: tuple[str, ...]) -> bool:
    """As PEFT compares them: equal, or the last parts."""
    return any(f".{name}".endswith(f".{end}") for end in ends)
