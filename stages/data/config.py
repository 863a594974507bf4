"""Recipe options of training data: the dataset or mixture, its splits and format, and how rows become tokens."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import date
from pathlib import Path
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
"""Fields of a mixture's dataset that decide how much of it is trained on; the others decide how rows are read."""


class MixturePart(StrictModel):
    """One dataset of a mixture; a field that is not set has the value that `data` sets for all."""

    dataset: DatasetReference
    weight: PositiveFp32 | None = Field(
        None,
        description="Share of this dataset relative to other weights; default: by size (see `mixing`).",
    )
    max_epochs: PositiveFp32 | None = Field(
        None,
        description="Largest number of passes over this dataset's rows; a training that would make more is refused.",
    )
    split: SplitName | None = Field(None, description="Split of this dataset to train on; default: `split` of `data`.")
    evaluation_split: SplitName | None = Field(
        None, description="Held-out split of this dataset; default: `evaluation_split` of `data`."
    )
    evaluation_fraction: float | None = Field(
        None,
        ge=0,
        lt=1,
        description="Fraction of this dataset's split held out; default: `evaluation_fraction` of `data`.",
    )
    format: DataFormat | None = Field(None, description="Format of this dataset's rows; default: `format` of `data`.")
    columns: Annotated[dict[str, str] | None, AddedLater()] = Field(
        None, description="New names of this dataset's columns; default: `columns` of `data`."
    )
    chat_template: OutsidePath | None = Field(
        None,
        description="Jinja chat template for this dataset's rows; the trained model keeps that of `data`.",
    )
    train_on: Literal["assistant", "all"] | None = Field(
        None, description="Tokens of this dataset that carry loss; default: `train_on` of `data`."
    )

    @property
    def own(self) -> dict[str, object]:
        """Fields that a mixture's dataset sets itself; its `evaluation_fraction` replaces a split named in `data`."""
        own = {name: value for name, value in vars(self).items() if name not in OF_MIXTURE and value is not None}
        return {"evaluation_split": None, **own} if "evaluation_fraction" in own else own


def same_datasets(names: Iterable[str], stages: Mapping[str, StageConfig]) -> Iterator[tuple[str, str]]:
    """Yield pairs of stages with equal configs, which make the same dataset, to refuse both in one mixture."""
    known: dict[str, str] = {}
    for name in names:
        first = known.setdefault(stages[name].model_dump_json(exclude={"execution"}), name)
        if first != name:
            yield first, name


class Mixing(StrictModel):
    """Options for mixing several datasets: the order of their rows and the share of each."""

    strategy: Literal["interleave", "concat"] = Field(
        "interleave",
        description="Order of a mixture's rows. interleave: each dataset always has its weight's share, and begins "
        "again at its end. concat: all rows of all datasets once an epoch, shuffled together.",
    )
    weight_by: Literal["rows", "tokens"] = Field(
        "rows",
        description="Unit in which weights and sizes of datasets are counted: packed rows, or the tokens in them.",
    )
    temperature: PositiveFp32 = Field(
        1.0,
        description="Temperature of mixing: without weights, shares are proportional to sizes^(1/temperature).",
    )


RowKind = Literal["examples", "pairs", "labelled", "prompts"]
"""Kind of data to learn from: texts to imitate, answer pairs, answers labelled good or bad, or prompts to answer."""


@dataclass(frozen=True)
class KindOfRows:
    """Facts about rows of one kind. title: of many in messages; noun: of one. methods: sentence with those that learn.

    documents: names of the documents of a row. has_answers: whether rows have some to learn from, or a model gives them
    in training, so that no rows are set aside. has_labels: whether each row says if its answer is good.
    """

    title: str
    methods: str
    noun: str = "row"
    documents: tuple[str, ...] = ("",)
    has_answers: bool = True
    has_labels: bool = False


ROW_KINDS: dict[RowKind, KindOfRows] = {
    "examples": KindOfRows("examples", "`method: sft` learns from them, and distill"),
    "pairs": KindOfRows(
        "preference pairs",
        "`method: dpo` learns from them, and simpo, orpo, cpo and reward",
        noun="pair",
        documents=("chosen", "rejected"),
    ),
    "labelled": KindOfRows("labelled answers", "`method: kto` learns from them", has_labels=True),
    "prompts": KindOfRows("prompts", "`method: grpo` learns from them", noun="prompt", has_answers=False),
}

SpecialTokensPolicy = Literal["text", "refuse", "allow"]
"""Treatment of text in a row that spells a special token: encode it as text, refuse the row, or allow the token."""

DEFAULT_DATE = date(2026, 1, 1)
"""Date given to chat templates that write the current date; it is fixed so that runs are reproducible."""


def _as_date(value: object) -> object:
    """Convert a date written as text (JSON) to a date; YAML has dates already."""
    return date.fromisoformat(value) if isinstance(value, str) else value


class DataConfig(StrictModel):
    """Options of a stage's training data: the dataset or mixture, and how its rows become tokens."""

    dataset: DatasetReference | None = Field(
        None, description="Stage that makes the training dataset; required unless `datasets` lists several."
    )
    datasets: Annotated[tuple[MixturePart, ...], AddedLater()] = Field(
        (), description="Datasets of a mixture, set instead of `dataset`."
    )
    mixing: Annotated[Mixing, AddedLater()] = Field(
        Mixing(), description="Options for mixing the rows of several `datasets`."
    )
    split: SplitName = Field(
        "train",
        description="Split to train on: the dataset's files whose name, or whose folder's name, begins with it.",
    )
    evaluation_split: SplitName | None = Field(
        None,
        description="Split that is held out for evaluation; default: none, or the fraction in `evaluation_fraction`.",
    )
    evaluation_fraction: float = Field(
        0.0,
        ge=0,
        lt=1,
        description="Fraction of rows of `split` held out for evaluation, without an `evaluation_split`; default 0.",
    )
    format: DataFormat = Field(
        "auto", description="Format of the dataset's rows; auto: recognise it by the columns of the first row."
    )
    columns: Annotated[dict[str, str], AddedLater()] = Field(
        {},
        description="Columns to rename: from the dataset's name to the format's, such as `{question: query}`.",
    )
    chat_template: OutsidePath | None = Field(
        None, description="Jinja file of the chat template; default: the model's own template."
    )
    template_date: Annotated[date, BeforeValidator(_as_date), AddedLater()] = Field(
        DEFAULT_DATE,
        description="Date that chat templates see as today's (`strftime_now`); fixed, so that runs are reproducible.",
    )
    add_tokens: Annotated[tuple[Annotated[str, Field(min_length=1)], ...], AddedLater()] = Field(
        (),
        description="Texts that become tokens, such as `<|call|>`; each begins as the mean of the old tokens, and is "
        "learned. Only with `method: sft`, without an adapter.",
    )
    train_on: Literal["assistant", "all"] = Field(
        "assistant", description="Tokens that carry loss. assistant: only the assistant's answers; all: every token."
    )
    turns: Annotated[Literal["together", "separately"], AddedLater()] = Field(
        "together",
        description="Treatment of thoughts in earlier turns, which many chat templates drop. together: one document "
        "with those that the template keeps; separately: a further document for each turn that would lose "
        "them, ending with that turn.",
    )
    special_tokens_in_content: Annotated[SpecialTokensPolicy, AddedLater()] = Field(
        "text",
        description="Treatment of special tokens such as `<|im_end|>` in questions or answers: text encodes their "
        "letters, refuse makes the row bad, allow takes them as special.",
    )
    sequence_length: int = Field(
        2048, ge=2, description="Tokens in a packed row; the first one is only context, never a target."
    )
    packing: bool | Literal["cut"] = Field(
        True,
        description="Packing of documents into rows of `sequence_length`. true: several in a row, attention within "
        "each; false: one in a row; cut: texts, each ended by the end-of-text token, are joined and cut "
        "into full rows as in pre-training, with attention over the whole row; the rest is dropped.",
    )
    over_long: Literal["truncate", "drop", "fail"] = Field(
        "fail",
        description="Treatment of documents longer than `sequence_length`: cut their end, leave them out, or stop "
        "with an error.",
    )
    max_patches: Annotated[int | None, AddedLater()] = Field(
        None,
        ge=1,
        description="Most patches of a packed row, as towers make them of all its media, for which memory "
        "is planned; a document that has more is treated as one that is too long. Default: no bound but tokens.",
    )
    on_bad_rows: Literal["fail", "drop"] = Field(
        "fail",
        description="Treatment of bad rows. fail: stop with an error; drop: leave out and list in a file.",
    )
    max_bad_row_fraction: float = Field(
        0.01, ge=0, le=1, description="Largest fraction of rows that `on_bad_rows: drop` may drop; more is an error."
    )

    @property
    def parts(self) -> dict[str, DataConfig]:
        """Config of each dataset of a mixture, by its path in the recipe, such as `datasets.0.` (single: "")."""
        if not self.datasets:
            return {"": self} if self.dataset else {}
        whole = self.model_copy(update={"datasets": (), "mixing": Mixing()})
        return {f"datasets.{number}.": whole.model_copy(update=part.own) for number, part in enumerate(self.datasets)}

    @property
    def dataset_stage(self) -> str:
        """Name of the stage that makes the dataset. Asserts that there is only one, since a mixture has several."""
        assert self.dataset, "a mixture has several"
        return self.dataset

    def prompt_folder(self, inputs: Mapping[str, Path]) -> Path | None:
        """Return the folder of the only dataset, by stage name from `inputs`; None for rows that no dataset has."""
        return inputs[self.dataset] / "data" if self.dataset else None

    @property
    def is_mixture(self) -> bool:
        return len(self.parts) > 1

    @property
    def names(self) -> list[str]:
        """Names of a mixture's datasets: their stages', followed by the split where a stage occurs twice."""
        parts = list(self.parts.values())
        stages = [part.dataset_stage for part in parts]
        return [
            name if stages.count(name) == 1 else f"{name}.{part.split}"
            for name, part in zip(stages, parts, strict=True)
        ]

    @property
    def holds_out(self) -> bool:
        parts = self.parts.values() or (self,)  # without a dataset, rows of an environment
        return any(part.evaluation_split or part.evaluation_fraction for part in parts)

    def problems_among(self, stages: Mapping[str, StageConfig]) -> Iterator[str]:
        """Yield an error message for each dataset that a mixture contains twice because two stages make it."""
        for split in dict.fromkeys(part.split for part in self.parts.values()):
            names = [part.dataset_stage for part in self.parts.values() if part.split == split]
            for first, name in same_datasets(names, stages):
                yield (
                    f"data.datasets: {first} and {name} are the same dataset, whose rows would be there twice; name "
                    "one of them, with the weight of both"
                )

    def idle_fields(self) -> Iterator[tuple[str, str]]:
        """Yield each data option that has no effect because of the other options, with the reason, to warn the user."""
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
