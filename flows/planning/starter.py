"""A person's rows → a first recipe for them, with a task of their own held-out rows. Reads the file; writes nothing.

What it proposes is a place to start from, said with its reason in a comment: sizes follow from the rows, the learning
rate from the size of the model and the method.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from stages.core.errors import DataError
from stages.data.config import RowKind
from stages.data.documents import Conversation, Document, PlainText
from stages.data.files import BadRow, Row, read_rows
from stages.data.formats import RowReader
from stages.data.messages import RowError
from stages.data.portion import is_held_out

HELD_OUT_FRACTION = 0.05
MAX_QUESTIONS = 200
CHARACTERS_PER_TOKEN = 3
"""Of English it is 4 or more: rather a row that is longer than needed."""
FEW_TOKENS = 200_000
"""Over all epochs; a hundred steps of four packed rows of 512."""
SHORT_ANSWER_CHARACTERS = 40
LEARNING_RATES = {
    "sft": ((0.01, 3e-3), (1.5, 5e-5), (5, 2e-5), (1e9, 1e-5)),
    "dpo": ((1.5, 2e-6), (1e9, 5e-7)),
    "kto": ((1.5, 2e-6), (1e9, 5e-7)),
}
"""Method → (up to so many billion parameters, learning rate of AdamW over all weights)."""
METHOD_FOR: dict[RowKind, str] = {"examples": "sft", "pairs": "dpo", "labelled": "kto"}
DEFAULT_MODEL = "hf://Qwen/Qwen3-0.6B"


@dataclass
class Survey:
    """What the rows of a file are. `questions`: held-out rows of one question and its answer."""

    rows: RowKind
    num_rows: int = 0
    num_bad_rows: int = 0
    first_bad: str = ""
    num_characters: int = 0
    longest_characters: int = 0
    questions: list[dict[str, str]] = field(default_factory=list)

    @property
    def sequence_length(self) -> int:
        """Tokens of a packed row: a power of two that the longest row should fit in.

        Short where there is little to learn from: a hundred short rows, packed into three, would be two steps.
        """
        few = self.num_characters * self.epochs < FEW_TOKENS * CHARACTERS_PER_TOKEN
        return _power_of_two(self.longest_characters / CHARACTERS_PER_TOKEN, least=128 if few else 512, most=8192)

    @property
    def epochs(self) -> int:
        """Small sets are seen more than once."""
        return 3 if self.num_rows < 20_000 else 1

    @property
    def num_packed_rows(self) -> int:
        """Of one epoch, roughly."""
        return max(1, self.num_characters // CHARACTERS_PER_TOKEN // self.sequence_length)

    @property
    def batch(self) -> int:
        """Packed rows of a step, so that there are a hundred steps or more where the rows suffice."""
        return _power_of_two(self.num_packed_rows * self.epochs / 200, least=4, most=64)


@dataclass(frozen=True)
class Starter:
    """Texts by the file they are for, relative to the recipe's folder; and what a person should know of the rows."""

    files: dict[str, str]
    notes: tuple[str, ...]


def survey(data: Path) -> Survey:
    """Read every row once. Raises DataError for what holds no rows that any method learns from."""
    if not data.is_file():
        raise DataError(f"looking for rows: there is no file {data}; expected JSONL, JSON, CSV or Parquet")
    kind = _kind_of(read_rows(data.parent, [data]), data)
    found, reader = Survey(kind), RowReader("auto", kind)
    for row in read_rows(data.parent, [data]):
        try:
            if isinstance(row, BadRow):
                raise RowError(row.reason)
            documents = reader.read(row.content)
            _count(found, row, documents, is_good=reader.label(row.content) is not False)
        except RowError as error:
            found.num_bad_rows += 1
            found.first_bad = found.first_bad or f"{row.place}: {error}"
    if not found.num_rows:
        raise DataError(f"{data} holds no row to learn from; {found.first_bad or 'it is empty'}")
    return found


def starter(name: str, data: Path, model: str) -> Starter:
    """The recipe `NAME.yaml`, and where rows are questions with answers, a task of those that are held out."""
    found = survey(data.absolute())
    files = {f"{name}.yaml": _recipe(name, data.absolute(), model, found)}
    if found.questions:
        files |= {
            f"tasks/{name}.yaml": _task(name, found),
            f"tasks/{name}.jsonl": "".join(json.dumps(one, ensure_ascii=False) + "\n" for one in found.questions),
        }
    notes = [f"{data}: {found.num_rows:,} rows, about {found.num_characters // CHARACTERS_PER_TOKEN:,} tokens"]
    if found.num_bad_rows:
        notes.append(f"{found.num_bad_rows:,} bad rows, which stop the training; the first is {found.first_bad}")
    if not found.questions:
        notes.append("no task: no held-out row is one question with its answer; name one of lm-eval's under `tasks`")
    return Starter(files, tuple(notes))


def _kind_of(rows: Iterable[Row | BadRow], data: Path) -> RowKind:
    first = next((row.content for row in rows if isinstance(row, Row) and isinstance(row.content, dict)), None)
    if first is None:
        raise DataError(f'{data} holds no row with named columns; expected such as {{"messages": […]}} in each line')
    if {"chosen", "rejected"} <= first.keys():
        return "pairs"
    is_labelled = {"prompt", "completion"} <= first.keys() and str(first.get("label")).lower() in ("true", "false")
    return "labelled" if is_labelled else "examples"


def _count(found: Survey, row: Row, documents: tuple[Document, ...], *, is_good: bool) -> None:
    num_characters = sum(map(_num_characters, documents))
    found.num_rows += 1
    found.num_characters += num_characters
    found.longest_characters = max(found.longest_characters, num_characters)
    question = _question(documents[0]) if is_good else None
    if question and len(found.questions) < MAX_QUESTIONS and is_held_out(row.content, HELD_OUT_FRACTION):
        found.questions.append(question)


def _num_characters(document: Document) -> int:
    if isinstance(document, PlainText):
        return len(document.prompt) + len(document.completion)
    return sum(len(json.dumps(message, ensure_ascii=False)) for message in document.messages)


def _question(document: Document) -> dict[str, str] | None:
    """A user's one turn and the answer; None for anything else, which a task would have to ask otherwise."""
    if not isinstance(document, Conversation) or document.tools:
        return None
    roles = [message["role"] for message in document.messages]
    texts = [message.get("content") for message in document.messages]
    if roles != ["user", "assistant"] or not all(isinstance(text, str) and text.strip() for text in texts):
        return None
    return {"question": str(texts[0]), "answer": str(texts[1])}


def _power_of_two(wanted: float, least: int, most: int) -> int:
    power = least
    while power < wanted and power < most:
        power *= 2
    return power


def _billions(model: str) -> float:
    """Parameters that a model's name tells, such as `Qwen3-0.6B` and `qwen3-1m`; 7 where it tells none."""
    named = re.findall(r"(?<![\w.])(\d+(?:\.\d+)?)([bm])(?![a-z])", model.lower())
    return float(named[0][0]) / (1000 if named[0][1] == "m" else 1) if named else 7.0


def _task(name: str, found: Survey) -> str:
    short = median(len(one["answer"]) for one in found.questions) <= SHORT_ANSWER_CHARACTERS
    task: dict[str, Any] = {
        "task": name,
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": f"{name}.jsonl"}},
        "test_split": "test",
        "doc_to_text": "{{question}}",
        "doc_to_target": "{{answer}}",
    }
    if short:
        most = _power_of_two(max(len(one["answer"]) for one in found.questions), least=16, most=256)
        task |= {"output_type": "generate_until", "generation_kwargs": {"until": ["\n"], "max_gen_toks": most}}
        task["metric_list"] = [{"metric": "exact_match", "aggregation": "mean", "higher_is_better": True}]
    else:
        task |= {"output_type": "loglikelihood"}
        task["metric_list"] = [{"metric": "perplexity", "aggregation": "perplexity", "higher_is_better": False}]
    how = "answers must be equal" if short else "answers are long: how likely they are is scored"
    return f"# Held-out rows as questions; {how}.\n{_lines(task)}"


def _lines(tree: dict[str, Any]) -> str:
    return "".join(f"{key}: {json.dumps(value, ensure_ascii=False)}\n" for key, value in tree.items())


def _recipe(name: str, data: Path, model: str, found: Survey) -> str:
    method = METHOD_FOR[found.rows]
    billions = _billions(model)
    rate = next(rate for most, rate in LEARNING_RATES[method] if billions <= most)
    num_steps = max(1, found.num_packed_rows * found.epochs // found.batch)
    text = f"""\
# {found.num_rows:,} rows of {data.name}, learned by {model}. `lifecycle plan {name}.yaml` says what would run.
name: {name}

stages:
  base:
    kind: download
    model: {json.dumps(model)}

  rows:
    kind: download
    dataset: {json.dumps(f"file://{data}")}

  {method}:
    kind: train
    method: {method}
    model: base
    data:
      dataset: rows
      evaluation_fraction: {HELD_OUT_FRACTION}   # chosen by the content of a row: the same rows in every run
      sequence_length: {found.sequence_length}        # the longest row has about {
        found.longest_characters // CHARACTERS_PER_TOKEN:,} tokens
      over_long: {"truncate" if found.longest_characters / CHARACTERS_PER_TOKEN > 8192 else "fail"}
    epochs: {found.epochs}
    global_batch_size: {found.batch}           # packed rows; about {num_steps:,} steps in all
    layout: auto                   # the fastest that fits the machine at hand; `lifecycle layouts {name}.yaml --gpus 8`
    learning_rate: {rate:.1e}         # usual for {billions:g}B parameters, all of them trained
    warmup_steps: {num_steps // 20}
    max_grad_norm: 1.0
"""
    return text + (_evaluation(name, method) if found.questions else "")


def _evaluation(name: str, method: str) -> str:
    stages = {"evaluate-base": "base", "evaluate": method}
    texts = [
        f"""
  {stage}:
    kind: evaluate
    model: {model}
    tasks: [{name}]                # tasks/{name}.yaml: rows that training holds out
    task_folder: tasks
    apply_chat_template: true
"""
        for stage, model in stages.items()
    ]
    promotion = f"""
  promote:                         # champion of this name if it is no worse than the champion before it
    kind: promote
    name: {name}
    model: {method}
    evaluations: [evaluate]
    baselines: [evaluate-base]     # remove this line once there is a champion, to compare with it instead
"""
    return "".join([*texts, promotion])
