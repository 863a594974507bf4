"""Recipe options of training data: the dataset or mixture, its splits and format, and how rows become tokens."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from datetime import date
from typing import Annotated, Literal, Self

from pydantic import BeforeValidator, Field, model_validator

from stages.core.contract import DatasetReference, OutsidePath, StageConfig, StrictModel
from stages.core.fields import AddedLater, PositiveFp32, SplitName

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
"""Fields of a mixture's dataset that set its share in the mixture."""


class MixturePart(StrictModel):
    """One dataset of a mixture; a field that is not set has the value of `data`."""

    dataset: DatasetReference
    weight: PositiveFp32 | None = Field(
        None,
        description="Weight of the dataset: its share relative to the others' weights; default for all: by "
        "their sizes (`mixing`).",
    )
    max_epochs: PositiveFp32 | None = Field(
        None, description="Most passes over the dataset's rows; a training that would do more is refused."
    )
    split: SplitName | None = Field(None, description="Split of this dataset, as `split` of `data`.")
    evaluation_split: SplitName | None = Field(None, description="Held-out split of this dataset, as in `data`.")
    evaluation_fraction: float | None = Field(
        None, ge=0, lt=1, description="Share of this dataset held out, as in `data`."
    )
    format: DataFormat | None = Field(None, description="Format of this dataset's rows, as in `data`.")
    columns: Annotated[dict[str, str] | None, AddedLater()] = Field(
        None, description="New names of this dataset's columns, as in `data`."
    )
    chat_template: OutsidePath | None = Field(
        None, description="Chat template for this dataset, as in `data`; the trained model is used with that of `data`."
    )
    train_on: Literal["assistant", "all"] | None = Field(
        None, description="Tokens of this dataset that carry loss, as in `data`."
    )

    @property
    def own(self) -> dict[str, object]:
        """Fields that a mixture's part sets for its own rows; its `evaluation_fraction` replaces a named split."""
        own = {name: value for name, value in vars(self).items() if name not in OF_MIXTURE and value is not None}
        return {"evaluation_split": None, **own} if "evaluation_fraction" in own else own


def same_datasets(names: Iterable[str], stages: Mapping[str, StageConfig]) -> Iterator[tuple[str, str]]:
    """Yield pairs of a mixture's stages with one dataset, whose rows would occur twice: the first, and each other."""
    known: dict[str, str] = {}
    for name in names:
        first = known.setdefault(stages[name].model_dump_json(exclude={"execution"}), name)
        if first != name:
            yield first, name


class Mixing(StrictModel):
    """Options for combining the datasets of a mixture."""

    strategy: Literal["interleave", "concat"] = Field(
        "interleave",
        description="Order of a mixture's rows. interleave: at any time each has the share that its weight "
        "says; one that ends begins again. concat: all rows of all datasets once an epoch, shuffled "
        "together.",
    )
    weight_by: Literal["rows", "tokens"] = Field(
        "rows",
        description="Unit of the datasets' weights, and of their sizes where there are none: packed rows, or "
        "tokens in them.",
    )
    temperature: PositiveFp32 = Field(
        1.0,
        description="Temperature of mixing: without weights, shares are proportional to the sizes to the power "
        "of 1/temperature.",
    )


RowKind = Literal["examples", "pairs", "labelled", "prompts"]
"""Kind of row that a method learns from.

- examples: a text to imitate
- pairs: a chosen and a rejected answer
- labelled: an answer that is good or bad
- prompts: a prompt that the model answers itself
"""

METHODS_FOR: dict[RowKind, str] = {
    "examples": "`method: sft` learns from them, and distill",
    "pairs": "`method: dpo` learns from them, and simpo, orpo, cpo and reward",
    "labelled": "`method: kto` learns from them",
    "prompts": "`method: grpo` learns from them",
}
"""Methods that learn from each kind of row, in words for messages; the registry of methods lies above this room."""

SpecialTokensPolicy = Literal["text", "refuse", "allow"]
"""Treatment of special tokens within what people wrote."""

DEFAULT_DATE = date(2026, 1, 1)
"""Date for templates that write the current date: arbitrary, but the same in every run."""


def _as_date(value: object) -> object:
    """Return a date for its text: YAML has dates, JSON has them as text."""
    return date.fromisoformat(value) if isinstance(value, str) else value


class DataConfig(StrictModel):
    """Dataset or mixture that is learned from, and how its rows become tokens."""

    dataset: DatasetReference | None = Field(
        None, description="Stage that makes the training dataset; required, unless there are several (`datasets`)."
    )
    datasets: Annotated[tuple[MixturePart, ...], AddedLater()] = Field(
        (), description="Datasets of a mixture, instead of `dataset`."
    )
    mixing: Annotated[Mixing, AddedLater()] = Field(Mixing(), description="Rule by which `datasets` are mixed.")
    split: SplitName = Field(
        "train", description="Split to train on: files of the dataset whose name or folder begins with this."
    )
    evaluation_split: SplitName | None = Field(
        None, description="Held-out split for evaluation; see also `evaluation_fraction`."
    )
    evaluation_fraction: float = Field(
        0.0, ge=0, lt=1, description="Share of `split` held out for evaluation when no split is named."
    )
    format: DataFormat = Field(
        "auto", description="Format of the dataset's rows; auto: by the columns of the first row."
    )
    columns: Annotated[dict[str, str], AddedLater()] = Field(
        {},
        description="New names of columns: name in the rows → name that formats have, where they differ: "
        "`{question: query}`.",
    )
    chat_template: OutsidePath | None = Field(
        None, description="Jinja file of the chat template; default: the model's own template."
    )
    template_date: Annotated[date, BeforeValidator(_as_date), AddedLater()] = Field(
        DEFAULT_DATE, description="Date for templates that write the current one (`strftime_now`)."
    )
    train_on: Literal["assistant", "all"] = Field("assistant", description="Tokens that carry loss.")
    turns: Annotated[Literal["together", "separately"], AddedLater()] = Field(
        "together",
        description="Handling of earlier turns' thoughts. separately: where a template drops the thoughts of "
        "earlier turns, each turn is learned with its thoughts, in a document that ends with it.",
    )
    special_tokens_in_content: Annotated[SpecialTokensPolicy, AddedLater()] = Field(
        "text",
        description="Special tokens such as `<|im_end|>` in questions or answers. text: encoded as text; refuse: the "
        "row is bad; allow: the token itself.",
    )
    sequence_length: int = Field(
        2048, ge=2, description="Tokens of a packed row; the first of them is never predicted."
    )
    packing: bool | Literal["cut"] = Field(
        True,
        description="Packing of documents into rows. true: several documents in a row; attention does not cross "
        "their borders. cut: texts as pre-training has them: one after the other, each ended by the "
        "end-of-text token, cut into full rows; attention goes over the whole row, and what is left "
        "at the end is not learned.",
    )
    over_long: Literal["truncate", "drop", "fail"] = Field(
        "fail", description="Treatment of documents longer than sequence_length."
    )
    on_bad_rows: Literal["fail", "drop"] = Field(
        "fail", description="Treatment of rows that cannot be learned from. drop: list bad rows and train without them."
    )
    max_bad_row_fraction: float = Field(
        0.01, ge=0, le=1, description="Largest share of bad rows that may be dropped; more is an error."
    )

    @property
    def parts(self) -> dict[str, DataConfig]:
        """Config of each dataset alone, by the prefix of its fields in the recipe; without a mixture, this config."""
        if not self.datasets:
            return {"": self}
        whole = self.model_copy(update={"datasets": (), "mixing": Mixing()})
        return {f"datasets.{number}.": whole.model_copy(update=part.own) for number, part in enumerate(self.datasets)}

    @property
    def dataset_stage(self) -> str:
        """Name of the stage that makes the dataset; not for a mixture, whose `parts` have one each."""
        assert self.dataset, "a mixture has several"
        return self.dataset

    @property
    def is_mixture(self) -> bool:
        """Return whether the training data is a mixture of several datasets."""
        return len(self.parts) > 1

    @property
    def names(self) -> list[str]:
        """Names of a mixture's datasets: their stages, with the split where a stage is there twice."""
        parts = list(self.parts.values())
        stages = [part.dataset_stage for part in parts]
        return [
            name if stages.count(name) == 1 else f"{name}.{part.split}"
            for name, part in zip(stages, parts, strict=True)
        ]

    @property
    def holds_out(self) -> bool:
        """Return whether some rows are held out for evaluation."""
        return any(part.evaluation_split or part.evaluation_fraction for part in self.parts.values())

    def problems_among(self, stages: Mapping[str, StageConfig]) -> Iterator[str]:
        """Yield problems between this config and the other stages of its recipe."""
        for split in dict.fromkeys(part.split for part in self.parts.values()):
            names = [part.dataset_stage for part in self.parts.values() if part.split == split]
            for first, name in same_datasets(names, stages):
                yield (
                    f"data.datasets: {first} and {name} are the same dataset, whose rows would be there twice; name "
                    "one of them, with the weight of both"
                )

    def idle_fields(self) -> Iterator[tuple[str, str]]:
        """Yield each data option without effect, given the other fields, and the reason."""
        if not self.datasets:
            yield "mixing", "there is one dataset (`datasets` names several)"
        elif self.mixing.strategy == "concat":
            yield "mixing.weight_by", "`mixing.strategy: concat` takes every row once an epoch"
            yield "mixing.temperature", "`mixing.strategy: concat` takes every row once an epoch"
        elif self.datasets[0].weight:
            yield "mixing.temperature", "the datasets have weights"
        if self.evaluation_split:
            yield "evaluation_fraction", f"`evaluation_split: {self.evaluation_split}` is held out"
        if self.on_bad_rows == "fail":
            yield "max_bad_row_fraction", "`on_bad_rows: fail` drops none"
        if self.packing == "cut":
            yield "over_long", "`packing: cut` cuts every text"
            yield "train_on", "`packing: cut` learns every token"
        if self.format == "text":
            yield from ((field, "`format: text` has no conversations") for field in ("template_date", "turns"))
        if self.train_on == "all":
            yield "turns", "`train_on: all` learns every turn in one document"

    @model_validator(mode="after")
    def _texts_alone_are_cut(self) -> Self:
        for place, part in self.parts.items():
            if self.packing == "cut" and part.format != "text":
                raise ValueError(
                    f"`packing: cut` is for plain text, and `{place}format` is {part.format}: an answer would be cut "
                    "off from its question; say `format: text`, or `packing: true`"
                )
        return self

    @model_validator(mode="after")
    def _held_out_rows_are_others(self) -> Self:
        for place, part in self.parts.items():
            if part.evaluation_split == part.split:
                raise ValueError(
                    f"`{place}evaluation_split` is `{part.split}`, like `split`, so that nothing would be held out; "
                    "name another split, or hold out a part of this one (`evaluation_fraction`)"
                )
        return self

    @model_validator(mode="after")
    def _datasets_are_named_once(self) -> Self:
        if not self.dataset and not self.datasets:
            raise ValueError("names no data; say `dataset: STAGE`, or several (`datasets`)")
        if self.dataset and self.datasets:
            raise ValueError(f"has `dataset: {self.dataset}` and `datasets`; put it into the list, or remove the list")
        if twice := [name for name in dict.fromkeys(self.names) if self.names.count(name) > 1]:
            raise ValueError(
                f"`datasets` has the same split of the same dataset twice ({', '.join(twice)}); name it once, with the "
                "weight of both"
            )
        weighed = [part.weight is not None for part in self.datasets]
        if any(weighed) and not all(weighed):
            missing = [name for name, has in zip(self.names, weighed, strict=True) if not has]
            raise ValueError(
                f"`datasets`: {', '.join(missing)} has no `weight`, others have one; give all one, or none"
            )
        if any(weighed) and self.mixing.strategy == "concat":
            raise ValueError(
                "`mixing.strategy: concat` takes every row once an epoch, whatever `weight` says; remove the weights, "
                "or the strategy"
            )
        return self
