"""The curate stage reads all row formats, reports statistics, and names the bad row or field in errors."""

import csv
import gzip
import hashlib
import json

import pyarrow as pa
import pyarrow.parquet
import pytest
from PIL import Image
from pydantic import ValidationError

from flows.recipe.recipe import load_stages
from stages.core.errors import DataError, RecipeError
from stages.data.files import RowLocation
from stages.data.formats import RowReader
from stages.data.media.folder import MediaFolder
from stages.kinds.curate.config import CurateConfig
from tests.unit.stages.kinds.curate.curating import curate

QUESTION = {"role": "user", "content": "How do ships float on water that is lighter than steel?"}
ANSWER = {"role": "assistant", "content": "They push away water that weighs as much as they do."}
OTHER = {"role": "assistant", "content": "By magic, and by nothing but magic, as all sailors know."}
FORMS = {
    "messages": {"messages": [QUESTION, ANSWER]},
    "sharegpt": {"conversations": [{"from": "human", "value": "Why?"}, {"from": "gpt", "value": "Because."}]},
    "alpaca": {"instruction": "Say why.", "input": "It is.", "output": "Because."},
    "text": {"text": "A text that stands for itself."},
    "prompt and completion": {"prompt": "Why?", "completion": " Because."},
    "messages as prompt": {"prompt": [QUESTION], "completion": [ANSWER]},
    "preference": {"prompt": [QUESTION], "chosen": [ANSWER], "rejected": [OTHER]},
    "plain preference": {"prompt": "Why?", "chosen": " Because.", "rejected": " Why not?"},
    "labelled": {"prompt": "Why?", "completion": " Because.", "label": False},
    "prompt alone": {"prompt": "Why?", "answer": "Because."},
    "question alone": {"messages": [QUESTION], "answer": "They push."},
}


@pytest.mark.parametrize("form", FORMS)
def test_rows_of_every_format_come_out_as_they_were_but_copies(tmp_path, form):
    row = FORMS[form]
    found = curate(tmp_path, [row, row], exact_duplicates=True, near_duplicates={}, length={"min_characters": 3})
    assert found.rows == [row]
    assert [(one["line"], one["step"]) for one in found.dropped] == [(2, "exact_duplicates")]


def test_labels_tell_good_answers_from_bad_ones(tmp_path):
    rows = [{"prompt": "Why is it so?", "completion": " Because it is.", "label": label} for label in (True, False)]
    assert curate(tmp_path, rows, exact_duplicates=True, near_duplicates={}).rows == rows


def test_files_of_every_kind_are_read(tmp_path):
    rows = [{"prompt": f"Question {number} of many?", "completion": f" Answer {number}."} for number in range(4)]
    folders = {name: tmp_path / name / "data" for name in ("tables", "columns", "packed")}
    for folder in folders.values():
        folder.mkdir(parents=True)
    with (folders["tables"] / "train.csv").open("w", newline="") as stream:
        writer = csv.DictWriter(stream, ["prompt", "completion"])
        writer.writeheader()
        writer.writerows(rows[:1])
    pa.parquet.write_table(pa.Table.from_pylist(rows[1:3]), folders["columns"] / "train.parquet")
    (folders["packed"] / "train.jsonl.gz").write_bytes(gzip.compress(json.dumps(rows[3]).encode()))
    found = curate(tmp_path, dict.fromkeys(folders), exact_duplicates=True)
    assert found.rows == rows


def test_length_drops_by_characters_and_by_turns_and_says_what_was_measured(tmp_path):
    chat = [QUESTION, ANSWER] * 3
    rows = [
        {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Ho"}]},
        {"messages": [{"role": "system", "content": "Be brief."}, QUESTION, ANSWER]},
        {"messages": chat},
    ]
    found = curate(tmp_path, rows, length={"min_characters": 10, "max_turns": 2})
    assert found.rows == rows[1:2]
    assert [one["reason"] for one in found.dropped] == [
        "has 4 characters, fewer than min_characters, 10",
        "has 6 turns, more than max_turns, 2",
    ]


def test_each_step_is_reported_with_counts_reasons_and_examples(tmp_path):
    rows = [FORMS["messages"], {"messages": [QUESTION]}, FORMS["messages"], "no JSON\n"]
    found = curate(tmp_path, rows, exact_duplicates=True, on_bad_rows="drop", max_bad_row_fraction=0.5)
    steps = {step["step"]: step for step in found.report["steps"]}
    assert found.report["rows_read"] == {"mine": 4}
    assert {name: (step["dropped"], step["kept"]) for name, step in steps.items()} == {
        "bad_rows": (2, 2),
        "exact_duplicates": (1, 1),
    }
    (example,) = steps["exact_duplicates"]["examples"]
    assert example["row"] == "mine train.jsonl:3"
    assert "How do ships" in example["content"]
    assert found.result.metrics == {
        "num_rows": 1,
        "kept_share": 0.25,
        "dropped_bad_rows": 2,
        "dropped_exact_duplicates": 1,
    }
    assert found.result.files == ["report.json", "dropped.jsonl"]


def test_the_same_rows_give_the_same_bytes(tmp_path):
    rows = [{"text": f"Row {number % 7} of seven, which are there again and again."} for number in range(30)]
    one, other = (curate(tmp_path / name, rows, near_duplicates={"similarity": 0.9}) for name in "ab")
    for file in ("data/train.jsonl", "dropped.jsonl", "report.json"):
        assert (one.folder / file).read_bytes() == (other.folder / file).read_bytes()


def test_an_emptied_dataset_names_the_step_that_emptied_it(tmp_path):
    rows = [{"text": "Hi"}, {"text": "x" * 50}, {"text": "x" * 50}]
    with pytest.raises(
        DataError, match="`length` leaves nothing of the dataset: of 3 rows, length dropped 3 and left 0"
    ):
        curate(tmp_path, rows, length={"min_characters": 99}, exact_duplicates=True)


def test_no_rows_at_all_are_named(tmp_path):
    with pytest.raises(DataError, match="no rows in the datasets mine"):
        curate(tmp_path, [], exact_duplicates=True)


@pytest.mark.parametrize(
    ("rows", "fields", "expected"),
    [
        (["{\n"], {}, "1 of 1 rows cannot be read:\n  mine train.jsonl:1 is not valid JSON"),
        ([FORMS["text"], {"text": ""}], {}, "mine train.jsonl:2 has an empty `text`"),
        ([FORMS["text"], {}], {"on_bad_rows": "drop"}, "raise max_bad_row_fraction, 0.01"),
        ([{"question": "a", "solution": "b"}], {}, "mine train.jsonl:1: the first row has the columns `question`"),
        (
            [FORMS["text"]],
            {"length": {"max_turns": 2}},
            "`length`: mine train.jsonl:1 is plain text, which has",
        ),
        ({"a": [FORMS["text"]], "b": [FORMS["messages"]]}, {}, "a has `text` .plain text., b has `messages`"),
        ([FORMS["prompt alone"], {"prompt": "a", "completion": "b"}], {}, "the first row is a prompt alone"),
    ],
)
def test_what_cannot_be_curated_is_named(tmp_path, rows, fields, expected):
    with pytest.raises(DataError, match=expected):
        curate(tmp_path, rows, **{"exact_duplicates": True, **fields})


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, "names no step"),
        ({"datasets": ["mine", "mine"], "exact_duplicates": True}, "names mine twice"),
        ({"length": {}}, "names no bound"),
        ({"length": {"min_turns": 3, "max_turns": 2}}, "`min_turns` is 3, more than `max_turns`, 2"),
        ({"near_duplicates": {"similarity": 1.1}}, "less than or equal to 1"),
        ({"near_duplicates": {"similarity": 0.1}}, "greater than or equal to 0.2"),
        ({"datasets": []}, "at least 1 item"),
    ],
)
def test_what_cannot_be_meant_is_refused_with_the_recipe(fields, expected):
    with pytest.raises(ValidationError, match=expected):
        CurateConfig.model_validate({"kind": "curate", "datasets": ["mine"], **fields})


def test_two_stages_of_the_same_dataset_are_named_before_anything_runs(tmp_path):
    source = {"kind": "download", "dataset": "builtin/addition"}
    tree = {
        "one": source,
        "two": source,
        "clean": {"kind": "curate", "datasets": ["one", "two"], "exact_duplicates": True},
    }
    with pytest.raises(RecipeError, match=r"stages\.clean\.datasets: one and two are the same dataset"):
        load_stages("mine", tmp_path, tree)


def test_pictures_go_along_and_equal_questions_about_other_pictures_are_kept(tmp_path):
    folders = {name: tmp_path / name / "data" for name in ("files", "inside")}
    for folder in folders.values():
        (folder / "images").mkdir(parents=True)
    colors = {"a.png": "red", "b.png": "blue", "c.png": "green"}
    for name, color in colors.items():
        Image.new("RGB", (8, 8), color).save(folders["files"] / "images" / name)
    asked = {"messages": [{"role": "user", "content": "<image>What is it?"}, ANSWER]}
    rows = [{**asked, "images": [f"images/{name}"]} for name in ("a.png", "b.png", "a.png")]
    rows.append({**rows[0], "images": ["images/none.png"]})
    (folders["files"] / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    green = (folders["files"] / "images" / "c.png").read_bytes()
    inside = pa.Table.from_pylist([{**asked, "images": [{"bytes": green, "path": None}]}])
    pa.parquet.write_table(inside, folders["inside"] / "train.parquet")
    found = curate(
        tmp_path, dict.fromkeys(folders), exact_duplicates=True, on_bad_rows="drop", max_bad_row_fraction=0.5
    )
    assert found.rows[:2] == rows[:2]
    assert [one["reason"][:30] for one in found.dropped] == [
        "has the path 'images/none.png'",
        "says the same as files train.j",
    ]
    data = next(path for path in tmp_path.rglob("b.png") if folders["files"] not in path.parents).parents[1]
    assert {path.name for path in (data / "images").iterdir()} == {"a.png", "b.png"}
    again = RowReader("auto", "examples", media=MediaFolder.of(data, [data / "train.jsonl"]))
    digests = [
        again.read(row, RowLocation("train.jsonl", number))[0].media[0] for number, row in enumerate(found.rows, 1)
    ]
    assert digests[2].sha256 == hashlib.sha256(green).hexdigest()
    assert digests[2].path == "train.jsonl#3"
