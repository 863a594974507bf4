"""What a recipe may say of a dataset: which rows, how they become tokens."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import date
from typing import Annotated, Literal, Self

from pydantic import BeforeValidator, Field, PositiveInt, model_validator

from stages.core.contract import DatasetReference, OutsidePath, StrictModel
from stages.core.fields import AddedLater

DataFormat = Literal[
    "auto",
    "messages",
    "prompt_completion",
    "alpaca",
    "query_response",
    "sharegpt",
    "human_assistant",
    "text",
    "preference",
    "rejected_response",
    "rejected_messages",
    "labelled",
    "labelled_messages",
]

RowKind = Literal["examples", "pairs", "labelled", "prompts"]
"""What a row is to the method that learns from it: one text to imitate, a chosen and a rejected answer, an answer that
is good or bad, or a prompt that the model answers itself."""

METHODS_FOR: dict[RowKind, str] = {
    "examples": "`method: sft` learns from them, and distill",
    "pairs": "`method: dpo` learns from them, and simpo, orpo, cpo and reward",
    "labelled": "`method: kto` learns from them",
    "prompts": "`method: grpo` learns from them",
}
"""Whom rows are for, in the words of messages; the registry of methods lies above."""

SpecialTokensPolicy = Literal["text", "refuse", "allow"]
"""What becomes of special tokens within what people wrote."""

DEFAULT_DATE = date(2026, 1, 1)
"""Of templates that write the current date: any will do, but the same in every run."""


def _as_date(value: object) -> object:
    """YAML has dates, JSON has them as text."""
    return date.fromisoformat(value) if isinstance(value, str) else value


class DataConfig(StrictModel):
    """Which rows are learned from, and how they become tokens."""

    dataset: DatasetReference
    split: str = Field("train", min_length=1, description="Files of the dataset whose name or folder begins with this.")
    evaluation_split: str | None = Field(
        None, min_length=1, description="Held-out split; see also `evaluation_fraction`."
    )
    evaluation_fraction: float = Field(0.0, ge=0, lt=1, description="Share of `split` held out when no split is named.")
    format: DataFormat = Field("auto", description="auto: by the columns of the first row.")
    chat_template: OutsidePath | None = Field(None, description="Jinja file; default: the model's own template.")
    template_date: Annotated[date, BeforeValidator(_as_date), AddedLater()] = Field(
        DEFAULT_DATE, description="What a template that writes the current date (`strftime_now`) takes for it."
    )
    train_on: Literal["assistant", "all"] = Field("assistant", description="Tokens that carry loss.")
    turns: Annotated[Literal["together", "separately"], AddedLater()] = Field(
        "together",
        description="separately: where a template drops the thoughts of earlier turns, each turn is learned with its "
        "thoughts, in a document that ends with it.",
    )
    special_tokens_in_content: Annotated[SpecialTokensPolicy, AddedLater()] = Field(
        "text",
        description="What `<|im_end|>` in a question or an answer is. text: text; refuse: a bad row; allow: the token.",
    )
    sequence_length: PositiveInt = Field(2048, description="Tokens of a packed row.")
    packing: bool = Field(True, description="Several documents in a row; attention does not cross their borders.")
    over_long: Literal["truncate", "drop", "fail"] = Field("fail", description="Documents over sequence_length.")
    on_bad_rows: Literal["fail", "drop"] = Field("fail", description="drop: list them and go on without them.")
    max_bad_row_fraction: float = Field(0.01, ge=0, le=1, description="More dropped rows than this is an error.")

    @property
    def holds_out(self) -> bool:
        """Whether some rows are not learned from."""
        return bool(self.evaluation_split or self.evaluation_fraction)

    def idle_fields(self) -> Iterator[tuple[str, str]]:
        """Each field that does nothing beside what the others say, set or not, and why it does not."""
        if self.evaluation_split:
            yield "evaluation_fraction", f"`evaluation_split: {self.evaluation_split}` is held out"
        if self.on_bad_rows == "fail":
            yield "max_bad_row_fraction", "`on_bad_rows: fail` drops none"
        if self.format == "text":
            yield from ((field, "`format: text` has no conversations") for field in ("template_date", "turns"))
        if self.train_on == "all":
            yield "turns", "`train_on: all` learns every turn in one document"

    @model_validator(mode="after")
    def _held_out_rows_are_others(self) -> Self:
        if self.evaluation_split == self.split:
            raise ValueError(
                f"`evaluation_split` is `{self.split}`, like `split`, so that nothing would be held out; name another "
                "split, or hold out a part of this one (`evaluation_fraction`)"
            )
        return self
