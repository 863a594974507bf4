"""Atomic writes: a file has the old or the new content, never a part of it."""

import json

import pytest

from stages.core.files import read_json_lines, write_atomically


def test_a_file_is_replaced_as_a_whole(tmp_path):
    path = tmp_path / "record.json"
    write_atomically(path, "old")
    with path.open() as reader:
        write_atomically(path, "new and longer")
        assert reader.read() == "old", "who has the old file open reads all of it"
    assert path.read_text() == "new and longer"
    assert list(tmp_path.iterdir()) == [path]


def test_a_write_that_fails_leaves_the_old_file_and_nothing_else(tmp_path):
    path = tmp_path / "record.json"
    write_atomically(path, "old")
    with pytest.raises(UnicodeEncodeError):
        write_atomically(path, "half of a character: \ud800")
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_a_line_of_json_ends_where_json_says_so(tmp_path):
    rows = [{"text": "one\u2028two\x85three"}, {"text": ""}]
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    assert read_json_lines(path) == rows
