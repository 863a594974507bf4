"""Config of the merge stage, which adds adapters to their base model's weights."""

import math
from collections.abc import Iterator, Mapping
from typing import Annotated, ClassVar, Literal, Self

from pydantic import Field, NonNegativeInt, PositiveFloat, model_validator

from stages.core.contract import AdapterReference, ModelReference, StageConfig, base_of
from stages.core.fields import HELD_IN_FP32, AddedLater

Density = Annotated[float, Field(gt=0, lt=1, allow_inf_nan=False), HELD_IN_FP32]
Combination = Literal["linear", "ties", "dare_linear", "dare_ties"]


class MergeConfig(StageConfig):
    """Config of the merge stage: adds one or several LoRA adapters to their base model's weights, in its dtype."""

    STAGE_VERSION: ClassVar[int] = 1
    PRODUCTS = ("model",)
    RELATION = "merge"

    kind: Literal["merge"]
    model: ModelReference
    adapter: AdapterReference | None = Field(
        None, description="Adapter to merge; for several adapters set `adapters` instead."
    )
    adapters: Annotated[tuple[AdapterReference, ...], AddedLater()] = Field(
        (), description="Several adapters of the same LoRA rank, combined into one as by PEFT's `add_weighted_adapter`."
    )
    weights: Annotated[tuple[Annotated[float, HELD_IN_FP32], ...], AddedLater()] = Field(
        (), description="Weight of each of `adapters` in the sum, in the same order. Default: 1 each."
    )
    combination: Annotated[Combination, AddedLater()] = Field(
        "linear",
        description="Method of combining `adapters`. linear: weighted sums of their matrices A and of their matrices "
        "B; ties: sums of the largest elements whose signs agree (Yadav et al. 2023); dare_…: sums of "
        "random elements (Yu et al. 2024).",
    )
    density: Annotated[Density | None, AddedLater()] = Field(
        None, description="Share of each adapter's elements that the methods ties and dare_… keep, between 0 and 1."
    )
    seed: Annotated[NonNegativeInt, AddedLater()] = Field(
        0, description="Random seed of the methods dare_…, which keep randomly chosen elements."
    )
    max_difference: PositiveFloat = Field(
        0.05,
        description="Largest mean difference, in nats per token, of the merged model's log-probabilities from those "
        "that training recorded, rounding included; above it the stage fails.",
    )
    trust_remote_code: bool = Field(False, description="Allow the Python code that comes with the model to run.")

    @property
    def weighted(self) -> dict[str, float]:
        names = (self.adapter,) if self.adapter else self.adapters
        return dict(zip(names, self.weights or (1.0,) * len(names), strict=True))

    @property
    def is_plain(self) -> bool:
        """Return whether one adapter is merged at weight 1, so that the result must predict as training recorded."""
        return list(self.weighted.values()) == [1.0]

    @model_validator(mode="after")
    def _names_each_adapter_once(self) -> Self:
        if bool(self.adapter) == bool(self.adapters):
            raise ValueError("name what to merge as `adapter`, or as `adapters` for several; expected one of the two")
        if twice := [name for number, name in enumerate(self.adapters) if name in self.adapters[:number]]:
            raise ValueError(f"`adapters` names {twice[0]} twice; name it once, with the sum of its weights")
        return self

    @model_validator(mode="after")
    def _weights_leave_something(self) -> Self:
        if not self.weights:
            return self
        if len(self.weights) != len(self.adapters):
            raise ValueError(f"`weights` has {len(self.weights)} numbers for {len(self.adapters)} `adapters`")
        if not all(math.isfinite(weight) and weight for weight in self.weights):
            raise ValueError(f"`weights` are {list(self.weights)}; expected finite numbers but 0: leave an adapter out")
        if math.isclose(sum(self.weights), 0, abs_tol=1e-9):
            raise ValueError(f"`weights` {list(self.weights)} sum to 0: the adapters would cancel one another out")
        return self

    @model_validator(mode="after")
    def _options_of_the_combination_only(self) -> Self:
        prunes, several = self.combination != "linear", len(self.adapters) > 1
        if prunes and not several:
            raise ValueError(f"`combination: {self.combination}` combines several `adapters`, found one; remove it")
        if prunes != (self.density is not None):
            needs = "needs" if prunes else "has no use for"
            raise ValueError(
                f"`combination: {self.combination}` {needs} `density`, the share of elements that it keeps"
            )
        if self.seed and not self.combination.startswith("dare"):
            raise ValueError(f"`seed` is of dare_… alone, and `combination` is {self.combination}; remove it")
        return self

    def problems_among(self, stages: Mapping[str, StageConfig]) -> Iterator[str]:
        field = "adapter" if self.adapter else "adapters"
        ranks: dict[str, int] = {}
        for name in self.weighted:
            trained_on = base_of(name, stages)
            if trained_on != self.model:
                yield f"{field}: {name} was trained on {trained_on}, not on {self.model}; merge it into {trained_on}"
            if trained := getattr(getattr(stages[name], "adapter", None), "rank", None):
                ranks[name] = trained
        if len(set(ranks.values())) > 1:
            found = ", ".join(f"{name} has {rank}" for name, rank in ranks.items())
            yield f"adapters: expected the same rank, but {found}; train them with one rank"
