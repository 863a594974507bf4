"""What an engine does not honour of what a recipe says of training."""

from __future__ import annotations

from stages.adapters.config import AdapterConfig
from stages.adapters.legality import adapter_errors
from stages.parallel.layout import EngineName, Layout
from stages.planner.workload import Precision
from stages.train.moe import MoeConfig, moe_errors
from stages.train.optimizer import OptimizerConfig, optimizer_errors


def engine_errors(
    engine: EngineName,
    layout: Layout,
    precision: Precision,
    optimizer: OptimizerConfig,
    moe: MoeConfig,
    adapter: AdapterConfig | None,
) -> list[str]:
    """A sentence for each thing that does not go with the engine, or with one another."""
    has_adapter = adapter is not None
    errors = list(adapter_errors(engine, adapter)) if adapter else []
    errors += optimizer_errors(optimizer, engine, layout, precision, has_adapter=has_adapter)
    errors += moe_errors(moe, has_adapter=has_adapter)
    if precision == "fp8" and engine != "megatron":
        errors.append(
            "`precision: fp8` needs `engine: megatron`: FSDP2 has it of torchao, which is not in the environment of "
            "training; choose that engine, or say `precision: bf16`"
        )
    return errors
