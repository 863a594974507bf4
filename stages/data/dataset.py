"""Packed, tokenized documents on disk (memory-mapped) → batches. How they came there is `prepare`'s business.

A folder holds flat arrays: `tokens.bin` (int32) and `loss.bin` (bool: the token is learned) of all documents one after
the other, `document_starts.bin` and `row_starts.bin` (int64, one more than there are documents and rows: where each
begins, the latter counted in documents), and `about.json` (`Description`). Of labelled answers there is
`labels.bin` (bool: it is a good one) as well, and of pairs whose rows say so `margins.bin` (float32: by how much the
chosen answer is better).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import NonNegativeInt, PositiveFloat, PositiveInt

from stages.core.contract import StrictModel
from stages.data.batch import IGNORED, Batch
from stages.data.summaries import ToolPrompt

ABOUT = "about.json"
ARRAYS: dict[str, type[np.generic]] = {
    "tokens": np.int32,
    "loss": np.bool_,
    "document_starts": np.int64,
    "row_starts": np.int64,
}
BLOCK_DOCUMENTS = 1 << 20
"""Looked at together, where all would take memory."""
LABELS = "labels"
MARGINS = "margins"


class Description(StrictModel):
    """`about.json`: what a folder of packed documents holds, and what was left out of it.

    conversations: whether they were rendered by a chat template. num_good: of labelled answers. bytes_per_token: of
    texts that were cut into rows, in UTF-8; tokens that end a text are counted, and have no bytes. tool_prompts: one,
    where rows have tools; of a mixture, one of each such dataset.
    """

    sequence_length: PositiveInt
    packing: bool
    padding_token: NonNegativeInt
    num_rows: PositiveInt
    num_documents: PositiveInt
    num_tokens: PositiveInt
    num_target_tokens: PositiveInt
    num_source_rows: PositiveInt
    num_bad_rows: NonNegativeInt
    num_over_long: NonNegativeInt
    conversations: bool
    warnings: tuple[str, ...]
    num_good: NonNegativeInt | None = None
    has_margins: bool = False
    bytes_per_token: PositiveFloat | None = None
    tool_prompts: tuple[ToolPrompt, ...] = ()


Row = tuple[NDArray[np.int32], NDArray[np.bool_], NDArray[np.int64]]
"""Tokens, their loss flags, and the lengths of the documents they belong to."""


def is_complete(folder: Path) -> bool:
    """Whether the folder holds all that its description promises."""
    try:
        about = Description.model_validate_json((folder / ABOUT).read_text(encoding="utf-8"))
        sizes = {name: (folder / f"{name}.bin").stat().st_size // dtype().itemsize for name, dtype in ARRAYS.items()}
        margins = (folder / f"{MARGINS}.bin").stat().st_size if about.has_margins else None
        has_labels = about.num_good is None or (folder / f"{LABELS}.bin").stat().st_size == about.num_documents
    except (OSError, ValueError):
        return False
    has_own = has_labels and margins in (None, about.num_documents // 2 * np.dtype(np.float32).itemsize)
    return has_own and sizes == {
        "tokens": about.num_tokens,
        "loss": about.num_tokens,
        "document_starts": about.num_documents + 1,
        "row_starts": about.num_rows + 1,
    }


class PackedDataset:
    """Rows of whole documents; `len` counts rows. Opened lazily: costs no memory but what batches touch."""

    members: Mapping[str, PackedDataset] = MappingProxyType({})
    """Of a mixture, its datasets by name."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.about = Description.model_validate_json((folder / ABOUT).read_text(encoding="utf-8"))
        self._tokens, self._loss, self._document_starts, self._row_starts = (
            np.asarray(np.memmap(folder / f"{name}.bin", dtype=dtype, mode="r")) for name, dtype in ARRAYS.items()
        )
        self._labels = (
            np.fromfile(folder / f"{LABELS}.bin", dtype=np.bool_) if self.about.num_good is not None else None
        )

        self._margins = np.fromfile(folder / f"{MARGINS}.bin", dtype=np.float32) if self.about.has_margins else None

    def __len__(self) -> int:
        return self.about.num_rows

    @property
    def key(self) -> str:
        """Identifies the content: equal keys, equal batches. For caches of what is computed from the documents."""
        return self.folder.name

    @property
    def num_documents(self) -> int:
        """Documents in all rows; a preference pair is two."""
        return self.about.num_documents

    @property
    def document_lengths(self) -> NDArray[np.int64]:
        """int64 [num_documents]: tokens of each."""
        return np.diff(self._document_starts)

    @property
    def row_lengths(self) -> NDArray[np.int64]:
        """int64 [rows]: tokens of each, without padding."""
        return np.diff(self._document_starts[self._row_starts])

    @property
    def member_rows(self) -> dict[str, range]:
        """Of a mixture, the rows of each of its datasets by name; of one dataset, all, without a name."""
        return {"": range(len(self))}

    @property
    def longest_document(self) -> int:
        """Tokens of the longest."""
        starts = self._document_starts
        blocks = (
            starts[begin : begin + BLOCK_DOCUMENTS + 1] for begin in range(0, self.num_documents, BLOCK_DOCUMENTS)
        )
        return max(int(np.diff(block).max()) for block in blocks)

    @property
    def num_tokens(self) -> int:
        """Real tokens, without padding."""
        return self.about.num_tokens

    @property
    def num_target_tokens(self) -> int:
        """Tokens that carry loss."""
        return self.about.num_target_tokens

    @property
    def padding_fraction(self) -> float | None:
        """Share of a full pass over the rows, each `sequence_length` wide, that is padding; None without packing.

        Without packing a batch is only as wide as its longest row, so the share depends on which rows meet: training
        measures it.
        """
        if not self.about.packing:
            return None
        return 1 - self.num_tokens / (len(self) * self.about.sequence_length)

    def row_documents(self, row_indices: Sequence[int]) -> NDArray[np.int64]:
        """int64 [num_documents of the batch]: for each document of `batch(row_indices)` its number in the dataset."""
        return np.concatenate(
            [np.arange(self._row_starts[row], self._row_starts[row + 1]) for row in row_indices] or [np.arange(0)]
        )

    def documents(self, row: int) -> list[tuple[NDArray[np.int32], NDArray[np.bool_]]]:
        """Tokens and loss flags, [tokens] each, of every document of a row."""
        tokens, loss, lengths = self._row(row)
        borders = np.cumsum(lengths)[:-1]
        return list(zip(np.split(tokens, borders), np.split(loss, borders), strict=True))

    def labels(self, row: int) -> list[bool]:
        """Of a row of labelled answers, whether each is a good one; of other rows nothing."""
        return [] if self._labels is None else self._labels[self.row_documents([row])].tolist()

    def margins(self, row: int) -> list[float]:
        """Of each pair of a row, by how much its chosen answer is better: 0 where nothing is said of it."""
        pairs = self.row_documents([row])[0::2] // 2
        return [0.0] * len(pairs) if self._margins is None else self._margins[pairs].tolist()

    def num_row_targets(self, row_indices: Sequence[int]) -> NDArray[np.int64]:
        """int64 [rows]: how many targets `batch` has in each of them."""
        return np.array([self._row(row)[1][1:].sum() for row in row_indices], dtype=np.int64)

    def batch(self, row_indices: Sequence[int], num_rows: int | None = None) -> Batch:
        """The rows as a micro-batch on the CPU; with `num_rows`, rows of padding follow until there are as many.

        As wide as `sequence_length` with packing, else as the longest of the rows.
        """
        batch = self._batch([self._row(row) for row in row_indices], num_rows)
        if self.about.has_margins:
            margins = [margin for row in row_indices for margin in self.margins(row)]
            batch = replace(batch, margins=torch.tensor(margins, dtype=torch.float32))
        if self.about.num_good is None:
            return batch
        labels = [label for row in row_indices for label in self.labels(row)]
        return replace(batch, is_good=torch.tensor(labels, dtype=torch.bool))

    def mismatched(self, row_indices: Sequence[int], num_rows: int | None = None) -> Batch:
        """As `batch`, but each document's answer comes after another one's prompt, that of the next in its row.

        So the same answers are there, and a row is as long as before. A document that is alone in its row gets the
        answer of one in the row before, or the beginning that fits. What is learned is one answer a document.
        """
        return self._batch([self._mismatched_row(row) for row in row_indices], num_rows)

    def _mismatched_row(self, row: int) -> Row:
        documents = self.documents(row)
        before = documents[-1] if len(documents) > 1 else self.documents((row - 1) % len(self))[-1]
        joined = []
        for (tokens, loss), (other, other_loss) in zip(documents, [before, *documents[:-1]], strict=True):
            own, answer = int(loss.argmax()), int(other_loss.argmax())
            joined.append((np.append(tokens[:own], other[answer:]), np.append(loss[:own], other_loss[answer:])))
        cut = [(tokens[: self.about.sequence_length], loss[: self.about.sequence_length]) for tokens, loss in joined]
        lengths = np.array([len(tokens) for tokens, _ in cut])
        return np.concatenate([tokens for tokens, _ in cut]), np.concatenate([loss for _, loss in cut]), lengths

    def _batch(self, rows: list[Row], num_rows: int | None) -> Batch:
        shape = (num_rows or len(rows), self._width([len(tokens) for tokens, _, _ in rows]))
        return packed_batch(rows, shape, self.about.padding_token)

    def _row(self, row: int) -> Row:
        starts = self._document_starts[self._row_starts[row] : self._row_starts[row + 1] + 1]
        tokens = slice(starts[0], starts[-1])
        return self._tokens[tokens], self._loss[tokens], np.diff(starts)

    def _width(self, num_tokens: list[int]) -> int:
        return self.about.sequence_length if self.about.packing else max(num_tokens, default=2)


def packed_batch(rows: Sequence[Row], shape: tuple[int, int], padding_token: int) -> Batch:
    """A micro-batch of `shape` [rows, sequence] on the CPU; what the rows leave of it is padding."""
    input_ids = np.full(shape, padding_token, dtype=np.int64)
    targets = np.full(shape, IGNORED, dtype=np.int64)
    for row, (tokens, loss, _) in enumerate(rows):
        input_ids[row, : len(tokens)] = tokens
        targets[row, : len(tokens) - 1] = np.where(loss[1:], tokens[1:], IGNORED)
    segments = _Segments([lengths for _, _, lengths in rows], shape)
    return Batch(
        input_ids=torch.from_numpy(input_ids),
        targets=torch.from_numpy(targets),
        position_ids=torch.from_numpy(segments.position_ids),
        document_ids=torch.from_numpy(segments.document_ids),
        num_documents=segments.num_documents,
        document_lengths=segments.lengths.tolist(),
    )


class _Segments:
    """Where documents, and the padding at the end of rows, lie in a batch of `shape` [rows, sequence]."""

    def __init__(self, document_lengths: list[NDArray[np.int64]], shape: tuple[int, int]) -> None:
        num_rows, width = shape
        self.num_documents = sum(map(len, document_lengths))
        lengths: list[int] = []
        numbers: list[int] = []
        document, padding = 0, self.num_documents
        for row in [*map(np.ndarray.tolist, document_lengths), *([[]] * (num_rows - len(document_lengths)))]:
            lengths += row
            numbers += range(document, document + len(row))
            document += len(row)
            if left := width - sum(row):
                lengths.append(left)
                numbers.append(padding)
                padding += 1
        self.lengths = np.array(lengths)
        starts = np.cumsum(self.lengths) - self.lengths
        self.position_ids = (np.arange(num_rows * width) - np.repeat(starts, self.lengths)).reshape(shape)
        self.document_ids = np.repeat(np.array(numbers), self.lengths).reshape(shape)


def row_order(num_rows: int, seed: int, epoch: int, number: int = 0) -> NDArray[np.int64]:
    """int64 [num_rows]: the order in which an epoch visits the rows; the same for every layout and after a resume.

    number: of the dataset in a mixture, each of which has an order of its own."""
    return np.random.default_rng([seed, epoch, *([number] if number else [])]).permutation(num_rows)
