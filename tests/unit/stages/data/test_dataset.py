"""Batches hold packed documents, separated from each other, with every next token as target."""

import errno
import time
from contextlib import closing

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from stages.core.errors import ResourceError, full_disk_named
from stages.data.batch import IGNORED
from stages.data.dataset import Description, PackedDataset, is_described, row_order
from stages.data.prepare import DatasetWriter
from stages.data.tokenizer import TokenizedDocument
from stages.data.units import Unit

PADDING = 0
SEQUENCE = 12


def document(ids, prompt):
    return TokenizedDocument(np.array(ids, np.int32), np.arange(len(ids)) >= max(1, prompt))


ROWS = [
    [Unit((document([1, 2, 3, 4], 2),)), Unit((document([5, 6, 7], 1),))],
    [Unit((document(range(20, 32), 5),))],
    [Unit((document([8, 9], 1), document([8, 10, 11], 1)))],
]


def write(folder, rows=ROWS, packing=True, sequence_length=SEQUENCE):
    folder.mkdir(exist_ok=True)
    with closing(DatasetWriter(folder)) as writer:
        for row in rows:
            writer.write_row(row)
        counts = {
            name: getattr(writer, name) for name in ("num_rows", "num_documents", "num_tokens", "num_target_tokens")
        }
        writer.finish(
            Description(
                sequence_length=sequence_length,
                packing=packing,
                padding_token=PADDING,
                num_source_rows=len(rows),
                num_bad_rows=0,
                num_over_long=0,
                conversations=False,
                warnings=(),
                **counts,
            )
        )
    return PackedDataset(folder)


@pytest.fixture
def dataset(tmp_path):
    return write(tmp_path)


def test_the_dataset_counts_what_it_holds(dataset):
    assert (len(dataset), dataset.num_documents, dataset.num_tokens) == (3, 5, 24)
    assert dataset.num_target_tokens == 2 + 2 + 7 + 1 + 2
    assert dataset.padding_fraction == pytest.approx(1 - 24 / 36)


def test_a_batch_is_laid_out_as_promised(dataset):
    batch = dataset.batch([0, 2])
    assert batch.inputs.input_ids.tolist() == [[1, 2, 3, 4, 5, 6, 7] + [0] * 5, [8, 9, 8, 10, 11] + [0] * 7]
    assert batch.signal.targets.tolist() == [
        [IGNORED, 3, 4, IGNORED, 6, 7, IGNORED] + [IGNORED] * 5,
        [9, IGNORED, 10, 11, IGNORED] + [IGNORED] * 7,
    ]
    assert batch.inputs.position_ids.tolist() == [
        [0, 1, 2, 3, 0, 1, 2, 0, 1, 2, 3, 4],
        [0, 1, 0, 1, 2, 0, 1, 2, 3, 4, 5, 6],
    ]
    assert batch.documents.ids.tolist() == [[0] * 4 + [1] * 3 + [4] * 5, [2] * 2 + [3] * 3 + [5] * 7]
    assert batch.documents.count == 4
    assert batch.documents.lengths == [4, 3, 5, 2, 3, 7]
    tensors = (batch.inputs.input_ids, batch.inputs.position_ids, batch.documents.ids, batch.signal.targets)
    assert {tensor.dtype for tensor in tensors} == {torch.int64}


def test_documents_of_a_batch_are_numbered_in_the_dataset_too(dataset):
    assert dataset.row_documents([2, 0]).tolist() == [3, 4, 0, 1]


def test_rows_of_padding_make_up_the_number(dataset):
    batch = dataset.batch([1], num_rows=2)
    assert batch.inputs.input_ids.tolist() == [list(range(20, 32)), [PADDING] * SEQUENCE]
    assert (batch.documents.count, batch.documents.lengths) == (1, [SEQUENCE, SEQUENCE])
    assert (batch.signal.targets[1] == IGNORED).all()
    assert dataset.batch([], num_rows=1).documents.ids.tolist() == [[0] * SEQUENCE]


def test_without_packing_a_batch_is_as_wide_as_its_longest_row(tmp_path):
    rows = [[unit] for row in ROWS for unit in row]
    dataset = write(tmp_path, rows, packing=False)
    assert dataset.batch([0, 1]).inputs.input_ids.tolist() == [[1, 2, 3, 4], [5, 6, 7, PADDING]]
    assert dataset.batch([3]).inputs.input_ids.shape == (1, 5)


@given(st.lists(st.integers(0, 2), min_size=1, max_size=5))
def test_the_parts_of_a_batch_agree(tmp_path_factory, rows):
    dataset = write(tmp_path_factory.getbasetemp() / "agree")
    batch = dataset.batch(rows)
    ids, positions = batch.documents.ids.flatten(), batch.inputs.position_ids.flatten()
    assert sum(batch.documents.lengths) == batch.inputs.input_ids.numel()
    assert sorted(set(ids.tolist())) == list(range(len(batch.documents.lengths)))
    assert [len(run) for run in torch.split(ids, batch.documents.lengths) if len(set(run.tolist())) == 1] == list(
        batch.documents.lengths
    )
    assert positions.tolist() == [position for length in batch.documents.lengths for position in range(length)]
    learned = (batch.signal.targets != IGNORED).nonzero()
    for row, position in learned.tolist():
        assert batch.signal.targets[row, position] == batch.inputs.input_ids[row, position + 1]
        assert batch.documents.ids[row, position] == batch.documents.ids[row, position + 1]


def test_references_must_be_one_a_document(dataset):
    batch = dataset.batch([2])
    assert batch.with_reference(torch.zeros(2)).to("cpu").signal.reference_log_probabilities.tolist() == [0, 0]
    with pytest.raises(ValueError, match="for 2 documents"):
        batch.with_reference(torch.zeros(3))


def test_a_batch_is_made_in_less_than_a_millisecond_of_cpu(tmp_path):
    rows = [[Unit((document(range(16), 8),)) for _ in range(16)] for _ in range(64)]
    dataset = write(tmp_path, rows, sequence_length=256)
    begin_s = time.process_time()
    for number in range(200):
        dataset.batch(range(number % 8, number % 8 + 8))
    assert (time.process_time() - begin_s) / 200 < 1e-3


def test_a_folder_of_a_version_that_says_other_things_of_it_is_not_described(dataset):
    assert is_described(dataset.folder)
    (dataset.folder / "about.json").write_text("{}")
    assert not is_described(dataset.folder)


def test_a_full_disk_is_told_as_such(tmp_path):
    (tmp_path / "tokens.bin").symlink_to("/dev/full")
    writer = DatasetWriter(tmp_path)
    with pytest.raises(ResourceError, match=r"writing: the disk of .* is full"), full_disk_named("writing", tmp_path):
        for _ in range(100_000):
            writer.write_row(ROWS[0])
    with pytest.raises(PermissionError), full_disk_named("writing", tmp_path):
        raise PermissionError(errno.EACCES, "Permission denied")


def test_every_epoch_visits_all_rows_in_an_order_of_its_own_that_can_be_repeated():
    first, again, second, other = (row_order(100, *key).tolist() for key in ((0, 0), (0, 0), (0, 1), (1, 0)))
    assert first == again
    assert sorted(first) == sorted(second) == list(range(100))
    assert len({tuple(order) for order in (first, second, other)}) == 3
