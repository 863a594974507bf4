"""Repeated, contradicting and held-out rows are found, however many rows are compared at a time."""

from pathlib import Path

import numpy as np
import pytest

from stages.core.errors import DataError
from stages.data import seen_rows
from stages.data.files import FilePart
from stages.data.seen_rows import ROW_DIGESTS, SeenRows, check_held_out

NUM_ROWS = 200


@pytest.mark.parametrize("share_rows", [1, 7, 64, NUM_ROWS, 10_000])
def test_repeated_and_contradicting_rows_are_counted_with_the_first(tmp_path, monkeypatch, share_rows):
    monkeypatch.setattr(seen_rows, "SHARE_ROWS", share_rows)
    draw = np.random.default_rng(share_rows)
    digests, swapped = (draw.integers(0, 2**64, NUM_ROWS, np.uint64) for _ in range(2))
    digests[[150, 90, 120]] = digests[[30, 60, 30]]
    swapped[[170, 11]] = digests[[3, 99]]
    seen = SeenRows(tmp_path)
    for begin in range(0, NUM_ROWS, 50):
        rows = slice(begin, begin + 50)
        part = FilePart(Path("train.jsonl"), "train.jsonl", num_before=begin)
        seen.add(part, digests[rows], swapped[rows], np.arange(1, 51, dtype=np.uint64), {})
    repeated, contradicting = seen.warnings()
    assert repeated.startswith("3 of 200 rows repeat an earlier one")
    assert repeated.endswith("train.jsonl:91 is train.jsonl:61 again")
    assert contradicting.startswith("2 of 200 pairs contradict another")
    assert contradicting.endswith(": train.jsonl:12 and train.jsonl:100")
    seen.close()
    assert [path.name for path in tmp_path.iterdir()] == [ROW_DIGESTS]


def test_without_rows_nothing_is_found(tmp_path):
    assert not [*SeenRows(tmp_path).warnings()]


def test_held_out_rows_are_found_in_every_share(tmp_path, monkeypatch):
    monkeypatch.setattr(seen_rows, "SHARE_ROWS", 7)
    folders = tmp_path / "training", tmp_path / "evaluation"
    for folder, numbers in zip(folders, (range(100), (*range(50, 60), 500)), strict=True):
        folder.mkdir()
        (folder / ROW_DIGESTS).write_bytes(np.array(numbers, np.uint64).tobytes())
    assert check_held_out(*folders).startswith("10 of 11 held-out rows are among the training rows too")
    (folders[1] / ROW_DIGESTS).write_bytes(np.arange(50, 60, dtype=np.uint64).tobytes())
    with pytest.raises(DataError, match="10 of 10 held-out rows"):
        check_held_out(*folders)
