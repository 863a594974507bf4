"""Judged completions → which are kept, as rows to learn from; of each of the others, why not."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from stages.data.documents import Document, PlainText
from stages.generate.config import Above, GenerateConfig
from stages.generate.sampling import Sample
from stages.rewards.judging import Judgement

Row = dict[str, Any]


@dataclass(frozen=True)
class Candidate:
    """A completion and what the rewards say of it."""

    sample: Sample
    judgement: Judgement


@dataclass(frozen=True)
class Choice:
    """What became of the completions of one prompt. outcomes: of each, `kept`, `chosen`, `rejected`, or why dropped."""

    rows: tuple[Row, ...]
    outcomes: tuple[str, ...]


def choose(document: Document, candidates: Sequence[Candidate], config: GenerateConfig) -> Choice:
    """Of the completions of one prompt, in the order of their numbers."""
    outcomes = dict(_unusable(candidates))
    usable = [one for number, one in enumerate(candidates) if number not in outcomes]
    ranked = sorted(usable, key=lambda one: -one.judgement.total)  # stable: of equal ones the first
    kept: list[Candidate] = []
    rows: list[Row] = []
    if config.keep == "pairs":
        gap = ranked[0].judgement.total - ranked[-1].judgement.total if ranked else 0.0
        if gap > 0 and gap >= (config.min_gap or 0):
            kept = [ranked[0], ranked[-1]]
            rows = [_pair(document, *(one.sample.text for one in kept))]
        reason = f"the best and the worst of its prompt are {gap:g} apart"
    elif config.keep == "best":
        kept, reason = ranked[:1], "another of its prompt is better, or as good"
    elif isinstance(config.keep, Above):
        kept = [one for one in usable if one.judgement.total > config.keep.above]
        reason = f"its reward is not above {config.keep.above:g}"
    else:
        kept, reason = usable, ""
    if config.keep != "pairs":
        rows = [_row(document, one.sample.text) for one in kept]
    elif kept:
        reason = "neither the best nor the worst of its prompt"
    labels = ("chosen", "rejected") if config.keep == "pairs" else ("kept",) * len(kept)
    named = {one.sample.sample: label for one, label in zip(kept, labels, strict=False)}
    return Choice(
        tuple(rows),
        tuple(
            outcomes.get(number) or named.get(one.sample.sample) or f"dropped: {reason}"
            for number, one in enumerate(candidates)
        ),
    )


def _unusable(candidates: Sequence[Candidate]) -> Iterator[tuple[int, str]]:
    """Number of each that nobody should learn from, and why."""
    first: dict[str, int] = {}
    for number, one in enumerate(candidates):
        text = one.sample.text
        if one.sample.truncated:
            yield number, "dropped: it was cut off at max_tokens"
        elif not text.strip():
            yield number, "dropped: it is empty"
        elif text in first:
            yield number, f"dropped: it is that of sample {first[text]} again"
        else:
            first[text] = number


def _row(document: Document, answer: str) -> Row:
    if isinstance(document, PlainText):
        return {"prompt": document.prompt, "completion": answer}
    return {"prompt": document.messages, "completion": _said(answer), **_of_conversation(document)}


def _pair(document: Document, chosen: str, rejected: str) -> Row:
    if isinstance(document, PlainText):
        return {"prompt": document.prompt, "chosen": chosen, "rejected": rejected}
    answers = {"chosen": _said(chosen), "rejected": _said(rejected)}
    return {"prompt": document.messages, **answers, **_of_conversation(document)}


def _said(answer: str) -> list[dict[str, str]]:
    return [{"role": "assistant", "content": answer}]


def _of_conversation(document: Any) -> Row:
    found = {"tools": list(document.tools), "chat_template_kwargs": document.variables}
    return {name: value for name, value in found.items() if value}
