"""Table of families: recorded outcomes of the zoo's proofs (`proofs.py`), by family and column."""

import json
import re
from pathlib import Path

RECORD = Path(__file__).with_name("families.json")
YES = "yes"
UNTRIED = "–"
WORKS = (YES, "packed", "rows")
"""Outcomes of a cell that is no refusal."""
LONGEST_REASON = 200


def recorded() -> dict[str, dict[str, str]]:
    """Return the recorded outcomes of each family, by column."""
    outcomes: dict[str, dict[str, str]] = json.loads(RECORD.read_text()) if RECORD.is_file() else {}
    return outcomes


def sentence(message: str) -> str:
    """Return what an error says was found: the first sentence, or the first of a list, without paths and advice."""
    first, *others = message.strip().splitlines()
    text = " ".join((others[0] if first.endswith(":") and others else message).split()).replace("|", "/")
    text = re.sub(r" in /\S+", "", text)
    text = re.sub(r"(\w+\.[\w.]+)(, \w+\.[\w.]+)+", r"\1 …", text)
    while (bare := re.sub(r" ?\([^()]*\)", "", text)) != text:
        text = bare
    text = re.split(r"; |\. (?=[A-Z])", text)[0].rstrip(".")
    return text if len(text) <= LONGEST_REASON else f"{text[:LONGEST_REASON]}…"


def _without_names(family: str, outcome: str) -> str:
    """Return a reason without the names of the family and its class, so that families with the same one share it."""
    unnamed = re.sub(r"\b(?!Auto)\w+(ForCausalLM|ForConditionalGeneration|LMHeadModel)\b", "the model", outcome)
    return re.sub(rf"\b{family}\b", "this one", unnamed).replace("quantized the model", "quantized model")


def table() -> str:
    """Return the recorded outcomes as a Markdown table: a row for families with equal ones, `no` by number."""
    numbers = {reason: number for number, reason in enumerate(_reasons(), 1)}
    grouped: dict[tuple[str, ...], list[str]] = {}
    for family, outcomes in _in_general().items():
        cells = [f"no ({numbers[outcome]})" if outcome in numbers else outcome for outcome in outcomes]
        grouped.setdefault(tuple(cells), []).append(f"`{family}`")
    columns = _columns()
    rows = [f"| families | {' | '.join(columns)} |", f"| --- | {' | '.join('---' for _ in columns)} |"]
    rows += [f"| {', '.join(families)} | {' | '.join(outcomes)} |" for outcomes, families in grouped.items()]
    return "\n".join(rows)


def reasons() -> str:
    """Return a Markdown table of what the numbers in the table of families stand for."""
    rows = [f"| {number} | {reason} |" for number, reason in enumerate(_reasons(), 1)]
    return "\n".join(["| no | because |", "| ---: | --- |", *rows])


def _columns() -> list[str]:
    return list(dict.fromkeys(column for outcomes in recorded().values() for column in outcomes))


def _in_general() -> dict[str, list[str]]:
    columns = _columns()
    return {
        family: [_without_names(family, outcomes.get(column, UNTRIED)) for column in columns]
        for family, outcomes in recorded().items()
    }


def _reasons() -> list[str]:
    found = dict.fromkeys(outcome for outcomes in _in_general().values() for outcome in outcomes)
    return [outcome for outcome in found if outcome not in (*WORKS, UNTRIED)]
