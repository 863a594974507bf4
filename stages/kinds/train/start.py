"""Training that starts from an adapter: whose it is, what must be the same, what its data are formatted with.

`model:` names a stage that made an adapter: training goes on with it, or, with `adapter: {stack: merge}`, a new one
learns beside the model that it is merged into. What is written is one adapter of the base, whose rank is then the sum.
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
    """What is wrong between a train stage's fields and the adapter that it starts from, if it does; one a line."""
    if stages[model].product != "adapter":
        if base:
            yield f"base: is {base}, but {model} is no adapter; remove it"
        if adapter and adapter.stack:
            yield f"adapter.stack: {model} is no adapter that could be merged; remove it"
    elif base and base != base_of(model, stages):
        yield f"base: is {base}, but that of {model} is {base_of(model, stages)}; remove it: it is found by itself"
    elif adapter is None:
        yield (
            f"adapter: missing, and {model} makes an adapter; say `adapter:` to go on with it, or train what a stage "
            "of `kind: merge` makes of it"
        )
    elif adapter.stack:
        if adapter.use_dora or written_adapter(model, stages).get("use_dora"):
            yield "adapter.stack: an adapter with `use_dora` adds to no other; merge by a stage of `kind: merge`"
    else:
        yield from _differences(model, adapter, stages)


def written_adapter(name: str, stages: Mapping[str, StageConfig]) -> dict[str, Any]:
    """Fields that an adapter stage must be given to go on with the one that `name` writes, as far as recipes say it."""
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
    """With the chat template of the artifact `start`, if that is an adapter and the recipe names none."""
    template = start / "adapter" / "chat_template.jinja"
    if data.chat_template or not template.is_file():
        return data
    return data.model_copy(update={"chat_template": template})


def _differences(model: str, adapter: AdapterConfig, stages: Mapping[str, StageConfig]) -> Iterator[str]:
    written = written_adapter(model, stages)
    found = adapter.model_dump(mode="json")
    for field in (*SAME, *SAME_LAYERS):
        if field in written and found[field] != written[field]:
            yield (
                f"adapter.{field}: is {found[field]}, but {model} writes an adapter with {written[field]}, and that is "
                "gone on with; say the same, or `stack: merge` to put a new one on the merged model"
            )
    if adapter.init != "default":
        yield f"adapter.init: is {adapter.init}, but training goes on with what {model} makes; remove it"
