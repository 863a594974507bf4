"""What an engine does not honour of what a recipe says of training."""

from __future__ import annotations

from stages.adapters.config import AdapterConfig
from stages.adapters.legality import adapter_errors
from stages.engines.settings import Fp8Recipe
from stages.kinds.train.moe import MoeConfig, moe_errors
from stages.kinds.train.optimizer import OptimizerConfig, optimizer_errors
from stages.parallel.layout import EngineName, Layout
from stages.planner.workload import Precision


def engine_errors(
    engine: EngineName,
    layout: Layout,
    precision: Precision,
    fp8_recipe: Fp8Recipe,
    optimizer: OptimizerConfig,
    moe: MoeConfig,
    adapter: AdapterConfig | None,
) -> list[str]:
    """A sentence for each thing that does not go with the engine, or with one another."""
    has_adapter = adapter is not None
    errors = list(adapter_errors(engine, adapter)) if adapter else []
    errors += optimizer_errors(optimizer, engine, layout, precision, has_adapter=has_adapter)
    errors += moe_errors(moe, has_adapter=has_adapter)
    if fp8_recipe != "tensorwise" and engine != "fsdp":
        errors.append(
            f"`fp8_recipe: {fp8_recipe}` needs `engine: fsdp`, found {engine}, whose scales are of whole tensors; "
            "change either"
        )
    return errors


def score_head_errors(method: str, engine: EngineName, adapter: AdapterConfig | None) -> list[str]:
    """A sentence for each thing that does not go with a head that gives one number."""
    errors = []
    if engine != "fsdp":
        errors.append(f"`method: {method}` needs `engine: fsdp`: {engine} has no head of scores here")
    if adapter:
        errors.append(f"`method: {method}` trains whole models only; remove `adapter`")
    return errors
