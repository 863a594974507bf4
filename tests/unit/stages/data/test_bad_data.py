"""Data preparation refuses, drops or reports bad files and rows; one example of each common kind.

Nothing is silent: a case is refused with its place and reason, or used and counted in a warning, or said to be fine.
"""

import datetime
import gzip
import json
import os
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest

from stages.core.errors import DataError
from stages.data.config import DataConfig
from stages.data.prepare import prepare
from stages.models.facts import ModelFacts
from tests.unit.stages.data.reports import Reports

GOOD = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}
OTHER = {"messages": [{"role": "user", "content": "c"}, {"role": "assistant", "content": "d"}]}
CHAT = json.dumps(GOOD)
PAIR = json.dumps({"prompt": "q ", "chosen": "good", "rejected": "bad"})


@pytest.fixture
def outcome(tmp_path, tokenizer_folder):
    """Provide a function that prepares data files with given options, and returns the error or the warnings."""

    def find(files, rows="examples", tokenizer=tokenizer_folder, **options):
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
                ModelFacts(tokenizer),
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
    """Return a JSON chat row whose answer is the given JSON text."""
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


def no_such_zone(path: Path):
    when = pyarrow.array([5, 1], pyarrow.timestamp("us", tz="Mars/Olympus"))
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
    "an unknown time zone": ({"train.parquet": no_such_zone}, "train.parquet row 1 holds a value that Python"),
    "a file beside its compressed self": (
        {"train.jsonl": CHAT, "train.jsonl.gz": gzip.compress(CHAT.encode())},
        "has files twice: train.jsonl, train.jsonl.gz. Keep one of each.",
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


def chat(*turns, **columns):
    """Return a chat row whose turns alternate between user and assistant; a turn may be a whole message."""
    roles = ("user", "assistant")
    messages = [
        turn if isinstance(turn, dict) else {"role": roles[number % 2], "content": turn}
        for number, turn in enumerate(turns)
    ]
    return {"messages": messages, **columns}


def lines(*rows):
    return {"train.jsonl": "\n".join(map(json.dumps, rows))}


USER = {"role": "user", "content": "a"}


def calling(arguments):
    return {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": arguments}}]}


PREFERRED = {"prompt": "q ", "chosen": "good", "rejected": "bad"}
IMAGE = "images/cat.png"
MEANING = {
    "the row of a bad answer": (lines({"prompt": "a", "completion": "b", "label": False}), "1 has `label: false`"),
    "the same in CSV": ({"train.csv": "prompt,completion,label\na,b,False\n"}, "train.csv:2 has `label: false`"),
    "the same from a spreadsheet": (
        {"train.csv": "prompt,completion,label\na,b,FALSE\n"},
        "train.csv:2 has `label: false`",
    ),
    "a row of no weight": (
        lines(GOOD, {**OTHER, "weight": 0}),
        "train.jsonl:2 has `weight` 0: it is not to be learned",
    ),
    "a row without loss, in CSV": (
        {"train.csv": "text,loss\na b,False\nc d,True\n"},
        "train.csv:2 has `loss` 'False': it is not to be learned",
    ),
    "an answer that cannot be seen": (lines(chat("a", "\u200b\ufeff")), "special tokens or invisible characters"),
    "a number that is none in a call": (
        {"train.jsonl": json.dumps({"messages": [USER, calling({"x": float("nan")})]})},
        "has what is no JSON in `arguments` of tool call 1 of message 2",
    ),
    "an endless number in a tool": (
        {"train.jsonl": CHAT[:-1] + ', "tools": [{"name": "f", "most": 1e999}]}'},
        "has what is no JSON in `tools`",
    ),
    "a weight between": (lines(chat("a", {"role": "assistant", "content": "b", "weight": 0.5})), "has 0.5 as `weight`"),
    "loss on the user": (
        lines(chat({"role": "user", "content": "a", "loss": True}, "b")),
        "has `loss: True` in message 1, which is not the assistant's",
    ),
    "images": (
        lines(chat("<image>what?", "b", images=[IMAGE])),
        "has `images`, which this model, or this stage, does not read",
    ),
    "an image in a message": (
        lines(chat({"role": "user", "content": "a", "image": IMAGE}, "b")),
        "has `image` of message 1 of `messages`; expected media in columns of the row, or in parts",
    ),
    "options that the template never reads": (
        lines(chat("a", "b", chat_template_kwargs={"thinking": True})),
        "sets `thinking` in `chat_template_kwargs`, which the model's chat template does not take",
    ),
    "messages as an option": (
        lines(chat("a", "b", chat_template_kwargs={"messages": []})),
        "sets `messages` in `chat_template_kwargs`",
    ),
    "options that are no object": (
        lines(chat("a", "b", chat_template_kwargs="thinking")),
        "has a string as `chat_template_kwargs`; expected an object",
    ),
    "options that are no JSON": (
        {"train.jsonl": CHAT[:-1] + ', "chat_template_kwargs": {"x": NaN}}'},
        "has what is no JSON in `chat_template_kwargs`",
    ),
    "options of plain text": (
        lines({"prompt": "a", "completion": "b", "chat_template_kwargs": {"x": 1}}),
        "has a column `chat_template_kwargs` beside plain text",
    ),
    "calls of an old form": (
        lines(chat("a", {"role": "assistant", "content": "b", "function_call": {"name": "f"}})),
        "has an object as `function_call` of message 2 of `messages`",
    ),
    "two systems": (
        lines(chat({"role": "system", "content": "x"}, {"role": "user", "content": "a"}, "b", system="y")),
        "has a column `system` and another system message",
    ),
    "a system without messages": (
        lines({"prompt": "a", "completion": "b", "system": "s"}),
        "`system` beside plain text",
    ),
    "a history that is none": (
        lines({"instruction": "a", "output": "b", "history": ["x"]}),
        "in `history`; expected a",
    ),
    "two forms": (
        lines({"prompt": "a", "completion": "b"}, {"prompt": [{"role": "user", "content": "a"}], "completion": "b"}),
        "train.jsonl:2 is a conversation, but the first row is plain text",
    ),
    "another format": (lines(GOOD, {"text": "a b"}), "train.jsonl:2 has no `messages`; found `text`"),
    "answers of padding": (
        lines(chat("a", "<pad><pad> <pad>")),
        "has the answer '<pad><pad> <pad>', nothing but special",
    ),
    "answers of the end of text": (lines({"text": "</s>"}), "has the answer '</s>', nothing but special tokens"),
}


@pytest.mark.parametrize(("files", "message"), MEANING.values(), ids=MEANING)
def test_what_changes_the_meaning_of_a_row_is_refused_by_name(outcome, files, message):
    assert message in outcome(files)


PAIRS = {
    "white space": ({**PREFERRED, "rejected": " good\n"}, "differ by white space or invisible characters only"),
    "white space in messages": (
        {"prompt": [{"role": "user", "content": "q"}], "chosen": "a b", "rejected": "a  b"},
        "differ by white space or invisible characters only",
    ),
    "characters without width": (
        {**PREFERRED, "rejected": "go\u200bod"},
        "differ by white space or invisible characters only",
    ),
    "the prompt twice": ({"prompt": "Why?", "chosen": "Why? So.", "rejected": "Why? No."}, "would be there twice"),
    "a system beside plain text": ({**PREFERRED, "system": "s"}, "`system` beside plain text"),
    "padding": ({**PREFERRED, "rejected": "<pad>"}, "nothing but special tokens"),
    "transcripts of two questions": (
        {
            "chosen": "\n\nHuman: two?\n\nAssistant: 2",
            "rejected": "\n\nHuman: three?\n\nAssistant: 2",
        },
        "first differ in what the human says",
    ),
    "marked": (
        {
            "prompt": "q",
            "chosen": [{"role": "assistant", "content": "a", "weight": 0}],
            "rejected": [{"role": "assistant", "content": "b"}],
        },
        "has an answer in `chosen` that is marked not to be learned",
    ),
}


@pytest.mark.parametrize(("row", "message"), PAIRS.values(), ids=PAIRS)
def test_a_pair_that_teaches_nothing_is_refused(outcome, row, message):
    assert message in outcome(lines(PREFERRED, row), "pairs")


def test_transcripts_that_differ_from_an_answer_on_are_a_pair(outcome):
    shared = "\n\nHuman: two?\n\nAssistant: "
    ends = {"chosen": "2\n\nHuman: three?\n\nAssistant: 3", "rejected": "4\n\nHuman: why?\n\nAssistant: so"}
    rows = [{column: shared + end for column, end in ends.items()}, {"chosen": shared + "2", "rejected": shared + "3"}]
    assert outcome(lines(*rows), "pairs") == ""


def test_an_answer_that_begins_like_a_short_prompt_does_not_hold_it(outcome):
    assert outcome(lines({"prompt": "g", "chosen": "good", "rejected": "grim"}, PREFERRED), "pairs") == ""


COUNTED = {
    "repeated rows": (
        lines(GOOD, OTHER, {**GOOD, "id": 7}),
        "1 of 3 rows repeat an earlier one, and are learned as often as they are there: train.jsonl:3 is train.jsonl:1",
    ),
    "one row": (lines(GOOD), "there is one row only"),
    "control characters": (lines(GOOD, chat("a", "red \x1b[31m")), "1 of 2 rows hold control characters"),
    "what turns the writing": (lines(GOOD, chat("a", "\u202eevil")), "1 of 2 rows hold control characters"),
    "what deletes": (lines(GOOD, chat("a\x7f", "b")), "rows hold control characters, which are learned as they are"),
    "where pictures were": (
        lines(GOOD, chat("<image>what?", "a cat")),
        "1 of 2 rows hold what stands for pictures or sound, which is learned as text: train.jsonl:2 (<image>)",
    ),
    "fields that are not read": (
        lines({**GOOD, "id": 1}, chat({"role": "user", "content": "c", "name": "Ann"}, "d", id=1, source="web")),
        "`id` (2 rows), `messages[].name` (1 row), `source` (1 row)",
    ),
}


@pytest.mark.parametrize(("files", "warning"), COUNTED.values(), ids=COUNTED)
def test_what_is_learned_all_the_same_is_counted(outcome, files, warning):
    assert warning in outcome(files)


def test_pairs_that_contradict_each_other_are_counted(outcome):
    swapped = {**PREFERRED, "chosen": "bad", "rejected": "good"}
    found = outcome(lines(PREFERRED, swapped, {**PREFERRED, "prompt": "r "}), "pairs")
    assert "2 of 3 pairs contradict another, in which the rejected answer is the chosen one: train.jsonl:1 and" in found


def test_answers_with_both_labels_are_contradictions_and_no_repetitions(outcome):
    good, bad = ({"prompt": "q ", "completion": "a", "label": label} for label in (True, False))
    found = outcome(lines(good, {**good, "prompt": "r "}, bad), "labelled")
    assert "2 of 3 labelled answers contradict another, which gives the same answer the other label" in found
    assert found.endswith("train.jsonl:1 and train.jsonl:3")
    assert "repeat" not in found


def test_an_answer_that_is_labelled_twice_alike_is_a_repetition(outcome):
    good, bad = ({"prompt": f"{label} ", "completion": "a", "label": label} for label in (True, False))
    found = outcome(lines(good, bad, good), "labelled")
    assert "1 of 3 rows repeat an earlier one" in found and "contradict" not in found


def test_a_held_out_answer_that_is_learned_with_the_other_label_is_counted(outcome):
    good, bad = ({"prompt": "q ", "completion": "a", "label": label} for label in (True, False))
    held_out = {"validation.jsonl": "\n".join(map(json.dumps, [bad, {**bad, "prompt": "s "}]))}
    found = outcome(lines(good, {**bad, "prompt": "r "}) | held_out, "labelled", evaluation_split="validation")
    assert "1 of 2 held-out rows are among the training rows too" in found


def test_held_out_rows_that_are_learned_are_counted(outcome):
    held_out = {"validation.jsonl": "\n".join(map(json.dumps, [{**GOOD, "id": 3}, chat("x", "y")]))}
    found = outcome(lines(GOOD, OTHER) | held_out, evaluation_split="validation")
    assert "1 of 2 held-out rows are among the training rows too: the held-out loss is lower than it should be" in found


def test_held_out_rows_that_are_all_learned_are_refused(outcome):
    files = lines(GOOD, OTHER) | {"validation.jsonl": CHAT}
    assert "so nothing is held out" in outcome(files, evaluation_split="validation")


FINE = {
    "what is empty says nothing": lines(chat("a", "b", images=[], id=None, system=""), OTHER),
    "marks that ask for what is done anyway": lines(
        chat({"role": "user", "content": "a", "loss": False}, {"role": "assistant", "content": "b", "weight": 1}), OTHER
    ),
    "turns in a list of rows": {"train.json": f"[{CHAT},\n{json.dumps(OTHER)}]\n"},
    "options that are null, as tables have them": lines(
        chat("a", "b", chat_template_kwargs={"thinking": None}), {**OTHER, "chat_template_kwargs": "{}"}
    ),
    "a column of dates": {"train.parquet": dated},
}


@pytest.mark.parametrize("files", FINE.values(), ids=FINE)
def test_what_is_fine_is_said_nothing_of_but_which_columns_are_not_read(outcome, files):
    assert outcome(files) in ("", "training data: fields that are not read, and teach nothing: `day` (2 rows)")


def test_tokens_beyond_the_models_vocabulary_are_refused(outcome, tokenizer_folder, tmp_path):
    (tmp_path / "model").mkdir()
    for path in tokenizer_folder.iterdir():
        (tmp_path / "model" / path.name).write_bytes(path.read_bytes())
    (tmp_path / "model" / "config.json").write_text('{"vocab_size": 200}')
    found = outcome(lines(GOOD), tokenizer=tmp_path / "model")
    assert "train.jsonl:1 has the token 2" in found and "the model's vocabulary ends at 199" in found


def test_bad_preference_rows_are_named_too(outcome):
    bad = PAIR.replace('"bad"', r'"\ude00"')
    assert "train.jsonl:2 holds half of a character" in outcome({"train.jsonl": f"{PAIR}\n{bad}"}, "pairs")


def test_a_bad_row_among_good_ones_can_be_dropped(outcome):
    files = {"train.jsonl": "\n".join([CHAT, json.dumps(OTHER), nested(200), text_with(r'"\ud83d"')])}
    found = outcome(files, on_bad_rows="drop", max_bad_row_fraction=0.5)
    assert "2 of 4 rows cannot be learned from and were dropped: train.jsonl:3 is nested more than 100 deep" in found
