"""Which layers an adapter goes on: what a recipe names, as PEFT takes it, or the names that the model has instead.

PEFT itself leaves out without a word what it does not find, as long as something else is found.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator
from typing import Any

from torch import nn
from transformers.pytorch_utils import Conv1D

from stages.adapters.config import AdapterConfig
from stages.core.errors import ModelError

LAYER_NUMBER = re.compile(r".*?\.[^.]*\.(\d+)\.")
"""At the start of a module's name, as PEFT finds it: the first number is the layer's, a later one an expert's."""


def peft_targets(causal_lm: Any, config: AdapterConfig) -> list[str] | str:
    """PEFT's `target_modules`. Raises ModelError for what a field names that is not in the model, which has no adapter.

    PEFT takes numbers of layers only beside names: then `all-linear` and patterns become the names of their layers.
    """
    linear = [name for name, module in causal_lm.named_modules() if isinstance(module, nn.Linear | Conv1D)]
    if problems := "; ".join(_not_there(causal_lm, config, linear)):
        raise ModelError(f"putting an adapter on {type(causal_lm).__name__}: {problems}")
    targets = config.target_modules
    if isinstance(targets, tuple):
        return list(targets)
    if config.layers_to_transform is None:
        return targets
    head = causal_lm.get_output_embeddings()
    return [
        name
        for name in linear
        if layer_number(name) in config.layers_to_transform
        and (causal_lm.get_submodule(name) is not head if targets == "all-linear" else re.fullmatch(targets, name))
    ]


def layer_number(module: str) -> int | None:
    """Of the transformer layer that a module is part of, by its name; None for one that is part of none."""
    found = LAYER_NUMBER.match(module)
    return int(found[1]) if found else None


def check_layers(adapted: Iterable[str], config: AdapterConfig) -> None:
    """Raise ModelError unless something of each layer of `layers_to_transform` is adapted."""
    numbers = {layer_number(name) for name in adapted}
    if lost := [str(number) for number in config.layers_to_transform or () if number not in numbers]:
        raise ModelError(
            f"adapter.layers_to_transform names {', '.join(lost)}, in which target_modules {config.target_modules!r} "
            "matches nothing; leave these out"
        )


def _not_there(causal_lm: nn.Module, config: AdapterConfig, linear: list[str]) -> Iterator[str]:
    modules = [name for name, _ in causal_lm.named_modules()]
    called = f"linear layers are called {', '.join(_ends(linear))}"
    targets = config.target_modules
    if isinstance(targets, tuple):
        if lost := _unmatched(targets, modules):
            yield f"adapter.target_modules names {lost}, which it does not have; its {called}"
    elif targets != "all-linear" and not any(re.fullmatch(targets, name) for name in modules):
        example = f", as in {linear[0]}" if linear else ""
        yield f"the pattern {targets!r} of adapter.target_modules matches none of its modules; {called}{example}"
    if lost := _unmatched(config.exclude_modules, modules):
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
    """Those of `ends` that no name is or ends with, after a dot."""
    return ", ".join(end for end in ends if not any(f".{name}".endswith(f".{end}") for name in names))


def _ends(names: Iterable[str]) -> list[str]:
    return sorted({end for name in names if (end := name.rpartition(".")[2]) and not end.isdigit()})
