"""Training that starts from an adapter: checks of its base and fields, and its chat template.

`model:` names a stage that made an adapter: training continues it, or, with `adapter: {stack: merge}`, a new adapter
learns beside the model that it is merged into. The output is one adapter of the base, whose rank is then the sum.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from stages.adapters.config import AdapterConfig
from stages.core.contract import StageConfig, base_of
from stages.data.config import DataConfig

SAME = ("rank", "alpha", "use_rslora", "use_dora", "modules_to_save")
SAME_LAYERS = ("target_modules", "target_parameters", "exclude_modules", "layers_to_transform")


def start_problems(
    model: str, base: str | None, adapter: AdapterConfig | None, stages: Mapping[str, StageConfig]
) -> Iterator[str]:
    """Yield problems between a train stage's fields and the adapter that it starts from, if there is one."""
    if stages[model].product != "adapter":
        if base:
            yield f"base: is {base}, but {model} is no adapter; remove it"
        if adapter and adapter.stack:
            yield f"adapter.stack: {model} is no adapter that could be merged; remove it"
    elif base and base != base_of(model, stages):
        yield f"base: is {base}, but the base of {model} is {base_of(model, stages)}; remove it: it is derived"
    elif adapter is None:
        yield (
            f"adapter: missing, and {model} makes an adapter; add `adapter:` to continue it, or train the model that a "
            "stage of `kind: merge` makes of it"
        )
    elif adapter.stack:
        if adapter.use_dora or written_adapter(model, stages).get("use_dora"):
            yield "adapter.stack: an adapter with `use_dora` cannot be stacked; merge it by a stage of `kind: merge`"
    else:
        yield from _differences(model, adapter, stages)


def written_adapter(name: str, stages: Mapping[str, StageConfig]) -> dict[str, Any]:
    """Return the adapter fields that a stage must have to continue the adapter that `name` writes.

    Empty where the recipe does not say them.
    """
    config = stages[name]
    adapter = getattr(config, "adapter", None)
    if not isinstance(adapter, AdapterConfig):
        return {}
    written = adapter.model_dump(mode="json", include={*SAME, *SAME_LAYERS})
    rank = adapter.rank * (2 if adapter.changes_base else 1)
    if adapter.stack:
        start = written_adapter(config.references()["model"], stages)
        if not start:
            return {}
        rank += start["rank"]
    times = rank / adapter.rank
    return {**written, "rank": rank, "alpha": adapter.alpha * (math.sqrt(times) if adapter.use_rslora else times)}


def data_with_template(data: DataConfig, start: Path) -> DataConfig:
    """Return the data config with the chat template of the adapter in `start`, if the recipe names none."""
    template = start / "adapter" / "chat_template.jinja"
    if data.chat_template or not template.is_file():
        return data
    return data.model_copy(update={"chat_template": template})


def _differences(model: str, adapter: AdapterConfig, stages: Mapping[str, StageConfig]) -> Iterator[str]:
    written = written_adapter(model, stages)
    fields = adapter.model_dump(mode="json")
    for field in (*SAME, *SAME_LAYERS):
        if field in written and fields[field] != written[field]:
            yield (
                f"adapter.{field}: is {fields[field]}, but training continues the adapter of {model}, which has "
                f"{written[field]}; say the same, or `stack: merge` to put a new one on the merged model"
            )
    if adapter.init != "default":
        yield f"adapter.init: is {adapter.init}, but training continues the adapter of {model}; remove it"
