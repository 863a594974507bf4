"""What a recipe may say of a merge."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import ClassVar, Literal

from pydantic import Field, PositiveFloat

from stages.core.contract import AdapterReference, ModelReference, StageConfig
from stages.core.fields import Product


class MergeConfig(StageConfig):
    """Add an adapter to the model that it was trained on (→ `model/`, in that model's dtype)."""

    STAGE_VERSION: ClassVar[int] = 1

    kind: Literal["merge"]
    model: ModelReference
    adapter: AdapterReference
    max_difference: PositiveFloat = Field(
        0.05,
        description="Nats per token that recorded documents' log-probabilities may differ from what training computed, "
        "on average; the rounding of the merged weights is in it.",
    )
    trust_remote_code: bool = Field(False, description="Run the Python files that come with the model.")

    @property
    def product(self) -> Product:
        return "model"

    def problems_among(self, stages: Mapping[str, StageConfig]) -> Iterator[str]:
        adapter = stages.get(self.adapter)
        trained_on = getattr(adapter, "model", self.model)
        if trained_on != self.model:
            yield f"model: is {self.model}, but {self.adapter} was trained on {trained_on}; say `model: {trained_on}`"
