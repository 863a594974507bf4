"""Bad files and bad rows, one of each kind that people have: what becomes of every one of them, through `prepare`.

Nothing is silent: a case is refused with its place and reason, or used and counted in a warning, or said to be fine.
"""

from __future__ import annotations

import datetime
import json
import os
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest

from stages.core.errors import DataError
from stages.data.config import DataConfig
from stages.data.prepare import prepare

GOOD = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}
OTHER = {"messages": [{"role": "user", "content": "c"}, {"role": "assistant", "content": "d"}]}
CHAT = json.dumps(GOOD)
PAIR = json.dumps({"prompt": "q ", "chosen": "good", "rejected": "bad"})


class Reports:
    def __init__(self):
        self.warnings = []

    def progress(self, done, total, unit, message=""):
        pass

    def warn(self, message):
        self.warnings.append(message)


@pytest.fixture
def outcome(tmp_path, tokenizer_folder):
    """Files, and the options of a recipe's `data` → the error's text, or the warnings."""

    def find(files, rows="examples", **options):
        folder = tmp_path / "dataset"
        folder.mkdir()
        for name, content in files.items():
            path = folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            content(path) if callable(content) else path.write_bytes(
                content if isinstance(content, bytes) else content.encode()
            )
        config = DataConfig(dataset="data", **{"sequence_length": 256, **options})
        reports = Reports()
        try:
            prepare(
                folder,
                config,
                tokenizer_folder,
                rows=rows,
                cache=tmp_path / "cache",
                report=reports,
                bad_rows_file=tmp_path / "bad_rows.jsonl",
            )
        except DataError as error:
            return str(error)
        return "\n".join(reports.warnings)

    return find


def text_with(value):
    """A chat whose answer is this JSON text."""
    return CHAT.replace('"b"', value)


HALF = text_with(r'"\ud83d!"')
TWICE = CHAT.replace('"content": "b"', '"content": "b", "content": "c"')


def nested(depth):
    return '{"messages": ' + "[" * depth + "]" * depth + "}"


def corrupt_page(path: Path):
    rows = [{"text": f"row {number} " + "x" * 50} for number in range(2000)]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path, compression="snappy", use_dictionary=False)
    content = bytearray(path.read_bytes())
    content[200:900] = bytes([0xFF]) * 700
    path.write_bytes(content)


def far_future(path: Path):
    when = pyarrow.array([0, 2**62], pyarrow.timestamp("us"))
    pyarrow.parquet.write_table(pyarrow.table({"text": ["a b", "c d"], "when": when}), path)


def repeated_column(path: Path):
    table = pyarrow.Table.from_arrays([pyarrow.array(["a b"])] * 2, names=["text", "text"])
    pyarrow.parquet.write_table(table, path)


def broken_utf8(path: Path):
    array = pyarrow.array([b"good", b"\xff bad"], pyarrow.binary()).cast(pyarrow.string(), safe=False)
    pyarrow.parquet.write_table(pyarrow.table({"text": array}), path)


def dated(path: Path):
    rows = [{"text": text, "day": datetime.date(2024, 1, 1)} for text in ("a b", "c d")]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)


UNREADABLE = {
    "nested beyond Python's stack": ({"train.jsonl": nested(100_000)}, "train.jsonl:1 is nested too deeply"),
    "nested beyond sense": ({"train.jsonl": nested(200)}, "train.jsonl:1 is nested more than 100 deep in `messages`"),
    "a list nested beyond Python's stack": ({"train.json": "[" * 100_000}, "train.json:1 is not valid JSON: Nested"),
    "an integer without end": (
        {"train.jsonl": f'{CHAT[:-1]}, "id": {"9" * 5000}}}'},
        "train.jsonl:1 has a number of 5000 digits in `id`",
    ),
    "the same in a list": (
        {"train.json": f'[{CHAT},\n{CHAT[:-1]}, "id": {"9" * 5000}}}]'},
        "train.json:2 has a number of 5000 digits in `id`",
    ),
    "half of a character": (
        {"train.jsonl": HALF},
        r"train.jsonl:1 holds half of a character (\ud83d, a surrogate without the other one) in `messages.2.content`",
    ),
    "the same in a list of rows": ({"train.json": f"[{HALF}]"}, "train.json:1 holds half"),
    "the same in a key": ({"train.jsonl": CHAT.replace('"messages"', r'"\udc00"')}, "train.jsonl:1 holds half"),
    "a NUL": ({"train.jsonl": text_with(r'"a\u0000"')}, "train.jsonl:1 holds a NUL character in `messages.2.content`"),
    "a NUL in CSV": ({"train.csv": b"text\na\x00b\n"}, "train.csv:2 holds a NUL character in `text`"),
    "a key twice": ({"train.jsonl": '{"text": "a", "text": "b"}'}, "train.jsonl:1 has the key `text` twice"),
    "a key twice, deep in a list of rows": (
        {"train.json": f"[{CHAT},\n{TWICE}]"},
        "train.json:2 has the key `content` twice in `messages.2`",
    ),
    "a CSV column twice": ({"train.csv": "text,text\na,b\n"}, "train.csv has more than one column 'text'"),
    "a Parquet column twice": ({"train.parquet": repeated_column}, "train.parquet has more than one column 'text'"),
    "a corrupt Parquet page": ({"train.parquet": corrupt_page}, "train.parquet cannot be read as Parquet after row 0"),
    "a date that no calendar has": (
        {"train.parquet": far_future},
        "train.parquet row 2 holds a value that Python cannot represent",
    ),
    "Parquet text that is not UTF-8": ({"train.parquet": broken_utf8}, "train.parquet row 2 holds a value"),
    "a file name that is not UTF-8": ({os.fsdecode(b"train-\xff.jsonl"): CHAT}, "xff.jsonl' is not UTF-8; rename it"),
    "something after the list": ({"train.json": f"[{CHAT}]\n{CHAT}"}, "train.json:2 is not valid JSON: Extra data"),
    "something after an empty list": ({"train.json": "[] x"}, "train.json:1 is not valid JSON: Extra data"),
    "arguments nested without end": (
        {
            "train.jsonl": json.dumps(
                {"messages": [*GOOD["messages"][:1], {"role": "assistant", "tool_calls": "[" * 5000}]}
            )
        },
        "train.jsonl:1 holds JSON text that is nested too deeply",
    ),
}


@pytest.mark.parametrize(("files", "message"), UNREADABLE.values(), ids=UNREADABLE)
def test_what_cannot_be_read_is_refused_by_place_and_reason(outcome, files, message):
    assert message in outcome(files)


def test_bad_preference_rows_are_named_too(outcome):
    bad = PAIR.replace('"bad"', r'"\ude00"')
    assert "train.jsonl:2 holds half of a character" in outcome({"train.jsonl": f"{PAIR}\n{bad}"}, "pairs")


def test_a_bad_row_among_good_ones_can_be_dropped(outcome):
    files = {"train.jsonl": "\n".join([CHAT, json.dumps(OTHER), nested(200), text_with(r'"\ud83d"')])}
    found = outcome(files, on_bad_rows="drop", max_bad_row_fraction=0.5)
    assert "2 of 4 rows cannot be learned from and were dropped: train.jsonl:3 is nested more than 100 deep" in found
