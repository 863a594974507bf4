"""What a recipe may say of a serve stage."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import JsonValue

from stages.core.contract import ModelReference, StageConfig
from stages.core.fields import Product
from stages.serving.config import BenchmarkConfig, ServeExecution, ServingConfig
from stages.serving.registry import installed_version


class ServeConfig(StageConfig):
    """Start a server for a model, check it, measure it, and keep it up while this refresh needs it."""

    STAGE_VERSION: ClassVar[int] = 1

    kind: Literal["serve"]
    model: ModelReference
    serving: ServingConfig = ServingConfig()
    benchmark: BenchmarkConfig | None = BenchmarkConfig()
    execution: ServeExecution = ServeExecution()

    @property
    def product(self) -> Product:
        return "server"

    @property
    def devices(self) -> int:
        return self.serving.tensor_parallel_size

    def resolve_outside(self) -> dict[str, JsonValue]:
        return dict(installed_version())
