"""What a recipe may say of several datasets that are learned together."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Annotated, Literal

from pydantic import Field

from stages.core.contract import DatasetReference, OutsidePath, StageConfig, StrictModel
from stages.core.fields import AddedLater, SplitName
from stages.core.numbers import PositiveFp32

DataFormat = Literal[
    "auto",
    "messages",
    "prompt_completion",
    "alpaca",
    "query_response",
    "sharegpt",
    "human_assistant",
    "text",
    "sharegpt_preference",
    "messages_preference",
    "alpaca_preference",
    "preference",
    "rejected_response",
    "rejected_messages",
    "chosen_messages",
    "labelled",
    "labelled_messages",
    "labelled_sharegpt",
    "labelled_alpaca",
]

OF_MIXTURE = ("weight", "max_epochs")
"""Fields of a part that are not about its rows alone."""


class MixturePart(StrictModel):
    """One dataset of a mixture; of what it leaves out, `data` says how it is."""

    dataset: DatasetReference
    weight: PositiveFp32 | None = Field(
        None, description="Its share, beside the weights of the others; default for all: by their sizes (`mixing`)."
    )
    max_epochs: PositiveFp32 | None = Field(
        None, description="Passes over its rows; a training that would do more is refused."
    )
    split: SplitName | None = Field(None, description="As in `data`.")
    evaluation_split: SplitName | None = Field(None, description="As in `data`.")
    evaluation_fraction: float | None = Field(None, ge=0, lt=1, description="As in `data`.")
    format: DataFormat | None = Field(None, description="As in `data`.")
    columns: Annotated[dict[str, str] | None, AddedLater()] = Field(None, description="As in `data`.")
    chat_template: OutsidePath | None = Field(
        None, description="As in `data`; the trained model is used with that of `data`."
    )
    train_on: Literal["assistant", "all"] | None = Field(None, description="As in `data`.")

    @property
    def own(self) -> dict[str, object]:
        """What it says of its rows itself; a share that it holds out stands for a split that `data` names."""
        said = {name: value for name, value in vars(self).items() if name not in OF_MIXTURE and value is not None}
        return {"evaluation_split": None, **said} if "evaluation_fraction" in said else said


def same_datasets(names: Iterable[str], stages: Mapping[str, StageConfig]) -> Iterator[tuple[str, str]]:
    """Of stages that make the same of the same: the first, and each other one; their rows would be there twice."""
    known: dict[str, str] = {}
    for name in names:
        first = known.setdefault(stages[name].model_dump_json(exclude={"execution"}), name)
        if first != name:
            yield first, name


class Mixing(StrictModel):
    """How the datasets of a mixture come together."""

    strategy: Literal["interleave", "concat"] = Field(
        "interleave",
        description="interleave: at any time as much of each as its weight says, and one that is through begins again. "
        "concat: all rows of all datasets once an epoch, shuffled together.",
    )
    weight_by: Literal["rows", "tokens"] = Field(
        "rows", description="What weights, and sizes where there are none, are of: packed rows, or tokens in them."
    )
    temperature: PositiveFp32 = Field(
        1.0, description="Without weights, shares are as the sizes to the power of 1/temperature."
    )
