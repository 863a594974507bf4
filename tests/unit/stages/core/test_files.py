"""A file is the old one or the new one, never half of it."""

import pytest

from stages.core.files import write_atomically


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
