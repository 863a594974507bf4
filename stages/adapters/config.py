"""What a recipe may say of an adapter: low-rank weights that learn beside a frozen base (LoRA, Hu et al. 2021)."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, NonNegativeInt, PositiveFloat, PositiveInt

from stages.core.strict import StrictModel


class AdapterConfig(StrictModel):
    """Fields are named and meant as PEFT means them: a layer W x becomes W x + (alpha / rank) B A dropout(x)."""

    type: Literal["lora"] = "lora"
    rank: PositiveInt = Field(16, description="Rows of A and columns of B.")
    alpha: PositiveFloat = Field(32, description="B A x counts alpha / rank times.")
    dropout: float = Field(0.0, ge=0, lt=1, description="Of what enters A.")
    target_modules: Literal["all-linear"] | tuple[str, ...] | str = Field(
        "all-linear",
        description="Layers that learn. all-linear: all but the head; else ends of names (q_proj), or one regular "
        "expression over whole names.",
    )
    exclude_modules: tuple[str, ...] = Field((), description="Ends of names of layers that do not learn.")
    layers_to_transform: tuple[NonNegativeInt, ...] | None = Field(
        None, description="Numbers of the transformer layers that learn; default: all."
    )
    use_rslora: bool = Field(False, description="B A x counts alpha / √rank times (Kalajdzievski 2023).")
