"""What a recipe may say of a serve stage."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import JsonValue, model_validator

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

    @model_validator(mode="after")
    def _check_lengths(self) -> ServeConfig:
        longest = self.serving.max_model_len
        if self.benchmark and longest and self.benchmark.tokens > longest:
            raise ValueError(
                f"benchmark: input_tokens and output_tokens are {self.benchmark.tokens} together, more than "
                f"serving.max_model_len, {longest}; lower them, or raise that"
            )
        return self

    @property
    def product(self) -> Product:
        return "server"

    @property
    def devices(self) -> int:
        return self.serving.tensor_parallel_size

    def resolve_outside(self) -> dict[str, JsonValue]:
        return dict(installed_version())
