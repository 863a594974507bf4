"""Files of a dataset split are found and read in every format; broken files are refused."""

import csv
import json
import os
import random

import pyarrow
import pyarrow.parquet
import pytest

from stages.core.errors import DataError
from stages.data import files
from stages.data.files import BadRow, Row, RowLocation, find_files, num_places, read_rows
from stages.data.tokenized_rows import parts_of

ROWS = [{"text": "one"}, {"text": "two\nlines, and a comma"}, {"text": "drei 😀"}]


def make_files(folder, *names):
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("")


def found(folder, split):
    return [str(path.relative_to(folder)) for path in find_files(folder, split)]


@pytest.mark.parametrize(
    ("names", "split", "expected"),
    [
        (["train.jsonl", "validation.jsonl"], "validation", ["validation.jsonl"]),
        (["train.jsonl", "train_preferences.jsonl"], "train", ["train.jsonl"]),
        (["train_sft.jsonl", "test_sft.jsonl"], "train", ["train_sft.jsonl"]),
        (["training.jsonl", "test.jsonl", "train-b.jsonl"], "train", ["train-b.jsonl"]),
        (["train/b.json", "train/a.json", "test/a.json"], "train", ["train/a.json", "train/b.json"]),
        (
            [
                "data/train-00001-of-00002.parquet",
                "data/train-00000-of-00002.parquet",
                "data/test-00000-of-00001.parquet",
            ],
            "train",
            ["data/train-00000-of-00002.parquet", "data/train-00001-of-00002.parquet"],
        ),
        (["conversations.csv", "README.md", "dataset_infos.json"], "train", ["conversations.csv"]),
        ([".cache/train.jsonl", "train.csv"], "train", ["train.csv"]),
        (["train-00000-of-00001.jsonl.zst", "test.jsonl.gz"], "train", ["train-00000-of-00001.jsonl.zst"]),
        (["validation.json.gz", "train.json"], "validation", ["validation.json.gz"]),
        (["train.ndjson", "test.ndjson.gz", "more.txt"], "test", ["test.ndjson.gz"]),
    ],
)
def test_the_files_of_a_split_are_found_by_name(tmp_path, names, split, expected):
    make_files(tmp_path, *names)
    assert found(tmp_path, split) == expected


def test_a_missing_split_is_an_error_that_lists_what_is_there(tmp_path):
    make_files(tmp_path, "train.jsonl", "README.md")
    with pytest.raises(DataError, match=r"no files of the split 'test'.*There are: README.md, train.jsonl"):
        find_files(tmp_path, "test")


def test_an_empty_and_a_missing_folder_are_told_apart(tmp_path):
    with pytest.raises(DataError, match="The folder is empty"):
        find_files(tmp_path, "train")
    with pytest.raises(DataError, match="There is no such folder"):
        find_files(tmp_path / "nowhere", "train")


def test_a_split_in_two_formats_is_an_error(tmp_path):
    make_files(tmp_path, "train-a.jsonl", "train-b.csv")
    with pytest.raises(DataError, match=r"in \.csv and \.jsonl: train-a.jsonl, train-b.csv"):
        find_files(tmp_path, "train")


def write_jsonl(path):
    path.write_text("\n".join(json.dumps(row) for row in ROWS) + "\n\n", encoding="utf-8-sig")


def write_json(path):
    path.write_text(json.dumps(ROWS, indent=1))


def write_json_lines_under_another_name(path):
    path.write_text("\n".join(json.dumps(row) for row in ROWS))


def write_csv(path):
    with path.open("w", newline="", encoding="utf-8-sig") as stream:
        writer = csv.DictWriter(stream, ["text"])
        writer.writeheader()
        writer.writerows(ROWS)


def write_parquet(path):
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(ROWS), path, row_group_size=2)


@pytest.mark.parametrize(
    ("name", "write", "places"),
    [
        ("train.jsonl", write_jsonl, ["train.jsonl:1", "train.jsonl:2", "train.jsonl:3"]),
        ("train.json", write_json, ["train.json:2", "train.json:5", "train.json:8"]),
        ("train.json", write_json_lines_under_another_name, ["train.json:1", "train.json:2", "train.json:3"]),
        ("train.csv", write_csv, ["train.csv:2", "train.csv:3", "train.csv:5"]),
        ("train.parquet", write_parquet, ["train.parquet row 1", "train.parquet row 2", "train.parquet row 3"]),
    ],
)
def test_files_of_every_kind_give_the_same_rows_and_where_they_stand(tmp_path, name, write, places):
    write(tmp_path / name)
    rows = list(read_rows(tmp_path, [tmp_path / name]))
    assert [row.content for row in rows] == ROWS
    assert [str(row.place) for row in rows] == places
    assert num_places(tmp_path / name) >= rows[-1].place.number


def test_calls_of_different_tools_have_their_own_arguments_in_parquet_too(tmp_path):
    rows = [{"calls": [{"name": name, "arguments": {name[0]: 1}}], "text": None} for name in ("add", "double")]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "train.parquet")
    assert [row.content for row in read_rows(tmp_path, [tmp_path / "train.parquet"])] == rows


def test_a_malformed_line_is_named_with_its_column_and_the_others_are_read(tmp_path):
    (tmp_path / "train.jsonl").write_bytes(b'{"text": "one"}\n{"text" "two"}\n{"text": "\xff"}\n{"text": "four"}\n')
    rows = list(read_rows(tmp_path, [tmp_path / "train.jsonl"]))
    assert rows == [
        Row(RowLocation("train.jsonl", 1), {"text": "one"}),
        BadRow(RowLocation("train.jsonl", 2), "is not valid JSON: Expecting ':' delimiter at column 9"),
        BadRow(RowLocation("train.jsonl", 3), "is not UTF-8 text: invalid start byte at column 11"),
        Row(RowLocation("train.jsonl", 4), {"text": "four"}),
    ]


def test_a_csv_line_with_other_columns_than_the_header_is_a_bad_row(tmp_path):
    (tmp_path / "train.csv").write_text("prompt,completion\na,b\nc\nd,e,f\ng,h\n")
    rows = list(read_rows(tmp_path, [tmp_path / "train.csv"]))
    assert [type(row) for row in rows] == [Row, BadRow, BadRow, Row]
    assert rows[1] == BadRow(RowLocation("train.csv", 3), "has 1 columns, but the header names 2")


def test_a_csv_field_may_be_long(tmp_path):
    (tmp_path / "train.csv").write_text("text\n" + "x" * 200_000 + "\n")
    (row,) = read_rows(tmp_path, [tmp_path / "train.csv"])
    assert len(row.content["text"]) == 200_000


def test_files_that_are_not_what_their_names_say_are_errors(tmp_path):
    (tmp_path / "a.parquet").write_bytes(b"PAR1 but no more")
    (tmp_path / "b.csv").write_bytes(b"text\n\xff\n")
    (tmp_path / "c.json").write_text('[{"text": "one"},\n {"text" "two"}]')
    with pytest.raises(DataError, match=r"a\.parquet cannot be read as Parquet"):
        list(read_rows(tmp_path, [tmp_path / "a.parquet"]))
    with pytest.raises(DataError, match=r"b\.csv is not UTF-8"):
        list(read_rows(tmp_path, [tmp_path / "b.csv"]))
    with pytest.raises(DataError, match=r"c\.json:2 is not valid JSON: Expecting ':' delimiter at column 10"):
        list(read_rows(tmp_path, [tmp_path / "c.json"]))


def compress(path, codec):
    packed = path.with_name(f"{path.name}.{ {'gzip': 'gz', 'zstd': 'zst'}[codec] }")
    with pyarrow.output_stream(packed, compression=codec) as stream:
        stream.write(path.read_bytes())
    path.unlink()
    return packed


@pytest.mark.parametrize("codec", ["gzip", "zstd"])
@pytest.mark.parametrize(
    ("name", "write"),
    [("train.jsonl", write_jsonl), ("train.ndjson", write_jsonl), ("train.json", write_json), ("train.csv", write_csv)],
)
def test_a_compressed_file_gives_the_rows_and_lines_of_what_is_in_it(tmp_path, name, write, codec):
    write(tmp_path / name)
    plain = [(row.content, row.place.number) for row in read_rows(tmp_path, [tmp_path / name])]
    packed = compress(tmp_path / name, codec)
    assert find_files(tmp_path, "train") == [packed]
    rows = list(read_rows(tmp_path, [packed]))
    assert [(row.content, row.place.number) for row in rows] == plain
    assert rows[0].place.file == packed.name
    assert num_places(packed) >= rows[-1].place.number


@pytest.mark.parametrize("codec", ["gzip", "zstd"])
def test_a_compressed_file_that_was_cut_off_or_is_no_such_file_is_an_error(tmp_path, codec):
    (tmp_path / "train.jsonl").write_text("".join(f'{{"text": "{number}"}}\n' for number in range(10_000)))
    packed = compress(tmp_path / "train.jsonl", codec)
    content = packed.read_bytes()
    for damaged in (content[: len(content) // 2], b"plain text\n" * 100):
        packed.write_bytes(damaged)
        with pytest.raises(DataError, match=rf"{packed.name} cannot be decompressed to its end: .*fetch it again"):
            list(read_rows(tmp_path, [packed]))


@pytest.mark.parametrize("codec", ["gzip", "zstd"])
def test_the_lines_of_a_large_compressed_file_are_told_from_its_beginning(tmp_path, monkeypatch, codec):
    monkeypatch.setattr(files, "SAMPLED_BYTES_COMPRESSED", 4 * files.BLOCK_BYTES)
    rows = "".join(f'{{"text": "{random.randbytes(500).hex()}"}}\n' for _ in range(20_000))
    (tmp_path / "train.jsonl").write_text(rows)
    assert 18_000 <= num_places(compress(tmp_path / "train.jsonl", codec)) <= 22_000


def test_a_line_that_would_fill_the_memory_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(files, "LONGEST_LINE_BYTES", 1 << 20)
    (tmp_path / "train.jsonl").write_text('{"text": "a"}\n' + json.dumps({"text": "x" * (1 << 20)}))
    with pytest.raises(DataError, match=r"train.jsonl:2 is longer than 1 MiB; expected a row of JSON in each line"):
        list(read_rows(tmp_path, [tmp_path / "train.jsonl"]))


def test_the_lines_of_a_large_file_are_told_from_its_beginning(tmp_path, monkeypatch):
    monkeypatch.setattr(files, "BLOCK_BYTES", 10)
    monkeypatch.setattr(files, "SAMPLED_BYTES", 100)
    (tmp_path / "train.jsonl").write_text('{"a": 1}\n' * 100)
    assert 95 <= num_places(tmp_path / "train.jsonl") <= 105
    assert num_places(compress(tmp_path / "train.jsonl", "gzip")) == 101


def test_a_file_of_no_known_suffix_is_refused_with_those_that_are_known(tmp_path):
    for name, found in (
        ("rows.txt", "ends in '.txt'"),
        ("rows", "has no suffix"),
        ("rows.arrow.gz", "ends in '.arrow'"),
    ):
        (tmp_path / name).write_text('{"text": "a"}\n')
        with pytest.raises(DataError, match=rf"{found}; expected .jsonl, .ndjson, .json, .csv, .parquet"):
            list(read_rows(tmp_path, [tmp_path / name]))


def test_ndjson_is_json_lines(tmp_path):
    (tmp_path / "train.ndjson").write_text('{"text": "a"}\n{"text": "b"}\n')
    (path,) = find_files(tmp_path, "train")
    assert [row.content["text"] for row in read_rows(tmp_path, [path])] == ["a", "b"]
    assert [part.part.end for part in parts_of(path, path.name)] == [path.stat().st_size]


@pytest.mark.parametrize("text", ['"', '"text', '\ufeff"', '"text"x\none'])
def test_a_csv_without_a_header_that_can_be_read_is_refused(tmp_path, text):
    (tmp_path / "train.csv").write_text(text)
    with pytest.raises(DataError, match=r"the header of train.csv is not valid CSV: .*; expected names of columns"):
        list(read_rows(tmp_path, find_files(tmp_path, "train")))


@pytest.mark.parametrize("name", ["train.jsonl", "train/more.json.gz", "test.csv"])
@pytest.mark.parametrize(
    ("make", "kind"),
    [
        (lambda path: path.symlink_to("nowhere.jsonl"), "a link that leads nowhere, or to itself"),
        (lambda path: path.symlink_to(path.name), "a link that leads nowhere, or to itself"),
        (lambda path: path.symlink_to("/"), "a link to a folder"),
        (os.mkfifo, "a FIFO"),
    ],
    ids=["dangling link", "link to itself", "link to a folder", "FIFO"],
)
def test_what_is_named_like_data_and_is_no_file_is_refused_by_name(tmp_path, name, make, kind):
    make_files(tmp_path, "train/a.jsonl", ".cache/a.jsonl", "README.md")
    os.mkfifo(tmp_path / ".cache/train.jsonl")
    os.mkfifo(tmp_path / "notes")
    assert found(tmp_path, "train") == ["train/a.jsonl"]
    make(tmp_path / name)
    with pytest.raises(DataError, match=rf"{name} is {kind}; expected a file"):
        find_files(tmp_path, "train")
