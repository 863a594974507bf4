"""What a recipe may say of a curation: which rows of datasets are left out, and why."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import ClassVar, Literal, Self

from pydantic import Field, NonNegativeInt, PositiveInt, model_validator

from stages.core.contract import DatasetReference, StageConfig
from stages.core.fields import Product
from stages.core.strict import StrictModel

STEPS = ("length", "exact_duplicates", "near_duplicates")
"""In the order in which they are done."""


class Length(StrictModel):
    """Rows that are too short or too long are left out; both bounds of a pair may be there."""

    min_characters: NonNegativeInt = Field(0, description="Of all texts of a row together.")
    max_characters: PositiveInt | None = Field(None, description="The same.")
    min_turns: NonNegativeInt = Field(0, description="Messages of a conversation but the system's.")
    max_turns: PositiveInt | None = Field(None, description="The same.")

    @property
    def counts_turns(self) -> bool:
        """Whether rows must be conversations."""
        return bool(self.min_turns or self.max_turns)

    @model_validator(mode="after")
    def _leaves_something(self) -> Self:
        if not (self.min_characters or self.max_characters or self.counts_turns):
            raise ValueError("names no bound, so that it would leave out nothing; set one, or remove `length`")
        for unit in ("characters", "turns"):
            least, most = getattr(self, f"min_{unit}"), getattr(self, f"max_{unit}")
            if most is not None and least > most:
                raise ValueError(f"`min_{unit}` is {least}, more than `max_{unit}`, {most}: no row is both")
        return self


class NearDuplicates(StrictModel):
    """Of rows that say nearly the same, only the first is kept."""

    similarity: float = Field(
        0.5,
        ge=0.2,
        le=1,
        description="Share of the runs of `words` words that two rows have in common, of all that either has "
        "(Jaccard), from which on they are near-duplicates. Every 20th word changed leaves about 0.73.",
    )
    words: PositiveInt = Field(3, le=50, description="Words of a run.")


class CurateConfig(StageConfig):
    """Leave out rows of datasets that should not be learned from, each for a reason that is listed (→ `data/`)."""

    STAGE_VERSION: ClassVar[int] = 1

    kind: Literal["curate"]
    datasets: tuple[DatasetReference, ...] = Field(
        min_length=1, description="All of one format; of rows that repeat one another, the first is kept."
    )
    split: str = Field("train", min_length=1, description="Files of the datasets whose name or folder begins so.")
    on_bad_rows: Literal["fail", "drop"] = Field("fail", description="drop: list them and go on without them.")
    max_bad_row_fraction: float = Field(0.01, ge=0, le=1, description="More dropped bad rows than this is an error.")
    length: Length | None = Field(None, description="Step: too short and too long rows.")
    exact_duplicates: bool = Field(False, description="Step: rows from which the same would be learned again.")
    near_duplicates: NearDuplicates | None = Field(None, description="Step: rows that say nearly the same.")

    @property
    def product(self) -> Product:
        return "dataset"

    @property
    def steps(self) -> tuple[str, ...]:
        """Those that are asked for, in the order in which they are done."""
        return tuple(name for name in STEPS if getattr(self, name))

    def idle_fields(self) -> Iterator[tuple[str, str]]:
        yield from super().idle_fields()
        if self.on_bad_rows == "fail":
            yield "max_bad_row_fraction", "`on_bad_rows: fail` drops none"

    def problems_among(self, stages: Mapping[str, StageConfig]) -> Iterator[str]:
        known: dict[str, str] = {}
        for name in self.datasets:
            same = known.setdefault(_what_it_is(stages[name]), name)
            if same != name:
                yield f"datasets: {same} and {name} are the same dataset, whose rows would all be there twice; name one"

    @model_validator(mode="after")
    def _names_each_dataset_once(self) -> Self:
        if twice := [name for number, name in enumerate(self.datasets) if name in self.datasets[:number]]:
            raise ValueError(f"`datasets` names {twice[0]} twice, whose rows would all be there twice; name it once")
        if not self.steps:
            raise ValueError(f"names no step, so that it would leave out nothing; expected some of {', '.join(STEPS)}")
        return self


def _what_it_is(config: StageConfig) -> str:
    """The same text for stages that make the same of the same."""
    return config.model_dump_json(exclude={"execution"})
