"""Adapters among a server's models: their base in the recipe's lineage, and checks of their files before the start.

An adapter belongs to one base. In a recipe that is found by lineage and filled in as `base`, so that the base is among
the stage's inputs: no clean-up removes it, and containers have it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from stages.adapters.headers import ADAPTER_FOLDER, read_headers
from stages.core.contract import StageConfig, base_of
from stages.core.errors import ModelError

NOT_PUT_ON_A_BASE = ("use_dora", "modules_to_save", "target_parameters")
"""Options of a trained adapter that vLLM, the engine of new servers, serves only after merging."""


def adapters_base(model: str, stages: Mapping[str, StageConfig]) -> str | None:
    """Return the base of the stage `model` if that stage makes an adapter, else None."""
    return base_of(model, stages) if stages[model].product == "adapter" else None


def base_problems(
    model: str, base: str | None, adapters: Sequence[str], stages: Mapping[str, StageConfig]
) -> Iterator[str]:
    """Yield problems of a stage that serves `model`, on `base` if it is an adapter, with other `adapters` beside it."""
    for field, name in (("model", model), *((f"adapters.{number}", name) for number, name in enumerate(adapters))):
        trained = getattr(stages[name], "adapter", None)
        if found := [option for option in NOT_PUT_ON_A_BASE if getattr(trained, option, None)]:
            yield f"{field}: {name} trains an adapter with {', '.join(found)}, served merged only (`kind: merge`)"
    own_base = base_of(model, stages)
    if base not in (None, own_base):
        yield f"base: is {base}, but that of {model} is {own_base}; remove it: it is found automatically"
    elif base == model:
        yield f"base: is {base}, which is no adapter; remove it"
    for number, name in enumerate(adapters):
        if name in (model, *adapters[:number]):
            yield f"adapters.{number}: {name} is served already; every name can be given once"
        elif (other := base_of(name, stages)) != own_base:
            yield (
                f"adapters.{number}: {name} was trained on {other}, not on {own_base}, and one server has one base; "
                f"serve it in a stage of its own, or what a stage of `kind: merge` makes of it and {other}"
            )


def adapter_folders(names: Sequence[str], base: str, inputs: Mapping[str, Path]) -> dict[str, Path]:
    """Return name → folder of the adapters to serve on `base`. Raises ModelError for one trained on another model."""
    folders = {name: (inputs[name] / ADAPTER_FOLDER).resolve() for name in names}
    for name, folder in folders.items():
        trained_on = read_headers(folder).base
        if trained_on != inputs[base].name:
            raise ModelError(
                f"serving the adapter {name} on {inputs[base].name}: it was trained on {trained_on or 'no artifact'}; "
                "train it on this model, or serve it on its own"
            )
    return folders
