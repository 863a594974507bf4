"""Selection of scored completions: which become training rows, and why the others are dropped."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from stages.data.any_rows import Prompt
from stages.data.messages import Document, PlainText
from stages.kinds.generate.config import Above, GenerateConfig, Ranking, Solved
from stages.rewards.judging import Judgement
from stages.rollouts.asking import Sample

Row = dict[str, Any]


@dataclass(frozen=True)
class Candidate:
    """Completion of a prompt with its rewards, which may become a training row."""

    sample: Sample
    judgement: Judgement


@dataclass(frozen=True)
class Choice:
    """Training rows chosen among a prompt's completions. outcomes: `kept`, `chosen`,
    `rejected`, `right` or `wrong`, or why dropped."""

    rows: tuple[Row, ...]
    outcomes: tuple[str, ...]


def choose(prompt: Prompt, candidates: Sequence[Candidate], config: GenerateConfig) -> Choice:
    """Choose which completions of one prompt become training rows, or whether itself, as the config's `keep` says."""
    document, keep = prompt.document, config.keep
    if isinstance(keep, Solved):
        return _choose_solved(prompt, candidates, keep)
    unusable = dict(_unusable(candidates))
    usable = [candidate for candidate in candidates if candidate.sample.sample not in unusable]
    labels, reason = _labelled(usable, keep, config.min_gap or 0.0)
    labelled = {label: one.sample for one in usable if (label := labels.get(one.sample.sample))}
    if keep == "pairs":
        rows = [_pair(document, labelled["chosen"], labelled["rejected"])] if labelled else []
    else:
        rows = [_row(document, one.sample) for one in usable if one.sample.sample in labels]
    numbers = [completion.sample.sample for completion in candidates]
    dropped = {number: f"dropped: {unusable.get(number, reason)}" for number in numbers if number not in labels}
    return Choice(tuple(rows), tuple((labels | dropped)[number] for number in numbers))


def _choose_solved(prompt: Prompt, candidates: Sequence[Candidate], keep: Solved) -> Choice:
    """Choose the prompt's own row if as many completions are right as `keep` says."""
    least, most = keep.solved
    right = [one.judgement.total > keep.above for one in candidates]
    if least <= sum(right) <= most:
        return Choice((prompt.row,), tuple("right" if one else "wrong" for one in right))
    reason = f"dropped: {sum(right)} of {len(right)} are right, not {least} to {most}"
    return Choice((), (reason,) * len(right))


def _labelled(usable: Sequence[Candidate], keep: Ranking | Above, min_gap: float) -> tuple[dict[int, str], str]:
    """Return the labels (kept, chosen, rejected) of kept completions by number, and why all others are dropped."""
    ranked = sorted(
        usable, key=lambda candidate: -candidate.judgement.total
    )  # stable: the first of equal ones is the best
    match keep:
        case "all":
            return {candidate.sample.sample: "kept" for candidate in usable}, ""
        case "best":
            return {
                candidate.sample.sample: "kept" for candidate in ranked[:1]
            }, "another of its prompt is better, or as good"
        case "pairs":
            gap = ranked[0].judgement.total - ranked[-1].judgement.total if ranked else 0.0
            if gap == 0 or gap < min_gap:
                return {}, f"the best and the worst of its prompt are {gap:g} apart"
            labels = {ranked[0].sample.sample: "chosen", ranked[-1].sample.sample: "rejected"}
            return labels, "neither the best nor the worst of its prompt"
        case Above(above=bound):
            kept = {candidate.sample.sample: "kept" for candidate in usable if candidate.judgement.total > bound}
            return kept, f"its reward is not above {bound:g}"


def _unusable(candidates: Sequence[Candidate]) -> Iterator[tuple[int, str]]:
    """Yield the number of each completion that is cut off, empty or a repetition, with the reason to drop it."""
    first: dict[str, int] = {}
    for candidate in candidates:
        text, number = candidate.sample.whole, candidate.sample.sample
        if candidate.sample.flaw:
            yield number, candidate.sample.flaw
        elif not text.strip():
            yield number, "it is empty"
        elif first.setdefault(text, number) != number:
            yield number, f"it is that of sample {first[text]} again"


def _row(document: Document, answer: Sample) -> Row:
    if isinstance(document, PlainText):
        return {"prompt": document.prompt, "completion": answer.text}
    return {"prompt": answer.question or document.messages, "completion": answer.messages, **_of_conversation(document)}


def _pair(document: Document, chosen: Sample, rejected: Sample) -> Row:
    if isinstance(document, PlainText):
        return {"prompt": document.prompt, "chosen": chosen.text, "rejected": rejected.text}
    answers = {"chosen": chosen.messages, "rejected": rejected.messages}
    return {"prompt": chosen.question or document.messages, **answers, **_of_conversation(document)}


def _of_conversation(document: Any) -> Row:
    found = {"tools": list(document.tools), "chat_template_kwargs": document.variables}
    return {name: value for name, value in found.items() if value}
