"""Judged completions → which are kept, as rows to learn from; of each of the others, why not."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from stages.data.messages import Document, PlainText
from stages.kinds.generate.config import Above, GenerateConfig
from stages.rewards.judging import Judgement
from stages.rollouts.asking import Sample

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
    unusable = dict(_unusable(candidates))
    usable = [one for one in candidates if one.sample.sample not in unusable]
    labels, reason = _labelled(usable, config)
    texts = {label: one.sample.text for one in usable if (label := labels.get(one.sample.sample))}
    if config.keep == "pairs":
        rows = [_pair(document, texts["chosen"], texts["rejected"])] if texts else []
    else:
        rows = [_row(document, one.sample.text) for one in usable if one.sample.sample in labels]
    numbers = [one.sample.sample for one in candidates]
    dropped = {number: f"dropped: {unusable.get(number, reason)}" for number in numbers if number not in labels}
    return Choice(tuple(rows), tuple((labels | dropped)[number] for number in numbers))


def _labelled(usable: Sequence[Candidate], config: GenerateConfig) -> tuple[dict[int, str], str]:
    """Number of each completion that is kept, as what; and why the others are not."""
    ranked = sorted(usable, key=lambda one: -one.judgement.total)  # stable: of equal ones the first
    match config.keep:
        case "all":
            return {one.sample.sample: "kept" for one in usable}, ""
        case "best":
            return {one.sample.sample: "kept" for one in ranked[:1]}, "another of its prompt is better, or as good"
        case "pairs":
            gap = ranked[0].judgement.total - ranked[-1].judgement.total if ranked else 0.0
            if gap == 0 or gap < (config.min_gap or 0):
                return {}, f"the best and the worst of its prompt are {gap:g} apart"
            labels = {ranked[0].sample.sample: "chosen", ranked[-1].sample.sample: "rejected"}
            return labels, "neither the best nor the worst of its prompt"
        case Above(above=bound):
            kept = {one.sample.sample: "kept" for one in usable if one.judgement.total > bound}
            return kept, f"its reward is not above {bound:g}"


def _unusable(candidates: Sequence[Candidate]) -> Iterator[tuple[int, str]]:
    """Number of each that nobody should learn from, and why."""
    first: dict[str, int] = {}
    for one in candidates:
        text, number = one.sample.text, one.sample.sample
        if one.sample.truncated:
            yield number, "it was cut off at max_tokens"
        elif not text.strip():
            yield number, "it is empty"
        elif first.setdefault(text, number) != number:
            yield number, f"it is that of sample {first[text]} again"


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
