"""Reader of packed, tokenized documents on disk (memory-mapped), which returns them as batches.

A folder holds flat arrays: `tokens.bin` (int32) and `loss.bin` (bool) of all documents, `document_starts.bin` and
`row_starts.bin` (int64, one more than there are documents and rows; the latter counted in documents), and `about.json`
(`Description`); of labelled answers `labels.bin` (bool: good), of pairs with margins `margins.bin` (float32: by how
much the chosen answer is better); of documents with media `media.bin` (records, `media_reference`) and
`media_starts.bin` (int64: where those of each document begin, and the end). Pixels are nowhere: a batch's pictures are
decoded when it is made.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import NonNegativeInt, PositiveFloat, PositiveInt

from stages.core.contract import StrictModel
from stages.data.batch import IGNORED, Batch, Documents
from stages.data.media.addresses import as_address
from stages.data.media.prompts import PicturePrompt
from stages.data.media_reference import MediaReference, of_records
from stages.models.media import ModelPart
from stages.models.recorded import ToolPrompt

if TYPE_CHECKING:
    from stages.data.media.folder import MediaFolder
    from stages.models.media import MediaKind, Medium, Sampling
    from stages.models.processor import MediaProcessor

ABOUT = "about.json"
ARRAYS: dict[str, type[np.generic]] = {
    "tokens": np.int32,
    "loss": np.bool_,
    "document_starts": np.int64,
    "row_starts": np.int64,
}
BLOCK_DOCUMENTS = 1 << 20
"""Number of documents whose lengths are computed at a time, a limit that bounds the memory used."""
MOST_PICTURE_BYTES = 16 << 20
"""Largest number of bytes of the pictures of all prompts that are recorded, as `data:` addresses."""
LABELS = "labels"
MEDIA, MEDIA_STARTS = "media", "media_starts"
MARGINS = "margins"


class Description(StrictModel):
    """Description of a folder of packed documents, stored in `about.json`, with counts of the rows that were left out.

    conversations: whether a chat template rendered the documents. num_good: of labelled answers. bytes_per_token: UTF-8
    bytes per token of texts that were cut into rows; end-of-text tokens count, without bytes. tool_prompts: one prompt
    with tools per dataset that has them. picture_prompts: the first ones with pictures. num_patches: of all pictures,
    as a vision tower takes them. most_patches: of the pictures of one row. num_frames: of pictures and of videos'
    frames that a vision tower takes. num_sound_frames: of the spectrograms of all sounds, as an audio tower takes them.
    most_sound_frames: of the sounds of one row.
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
    picture_prompts: tuple[PicturePrompt, ...] = ()
    num_media: NonNegativeInt = 0
    num_patches: NonNegativeInt = 0
    most_patches: NonNegativeInt = 0
    num_frames: NonNegativeInt = 0
    num_sounds: NonNegativeInt = 0
    num_sound_frames: NonNegativeInt = 0
    most_sound_frames: NonNegativeInt = 0


See = Callable[[Batch, Sequence[Sequence["Medium"]]], Batch]
"""Function that puts the media of each of a batch's documents into the batch, as the model takes them."""
Row = tuple[NDArray[np.int32], NDArray[np.bool_], NDArray[np.int64]]
"""One packed row before it is written: token ids, flags of the tokens with loss, and lengths of its documents."""


def is_described(folder: Path) -> bool:
    """Return whether a prepared dataset's description can be read; another version of this code may have written it."""
    try:
        Description.model_validate_json((folder / ABOUT).read_bytes())
    except (OSError, ValueError):
        return False
    return True


class PackedDataset:
    """Dataset of packed rows on disk, memory-mapped so that only the rows of a batch are loaded; `len` counts rows."""

    members: Mapping[str, PackedDataset] = MappingProxyType({})
    """Datasets of a mixture by name; empty for a single dataset."""

    def __init__(self, folder: Path, media_folder: MediaFolder | None = None) -> None:
        """Open a folder of packed documents. media_folder: where the media of the documents are."""
        self.folder = folder
        self._media_folder = media_folder
        self._see: See | None = None
        self._processor: MediaProcessor | None = None
        self.about = Description.model_validate_json((folder / ABOUT).read_text(encoding="utf-8"))
        self._tokens, self._loss, self._document_starts, self._row_starts = (
            np.asarray(np.memmap(folder / f"{name}.bin", dtype=dtype, mode="r")) for name, dtype in ARRAYS.items()
        )
        self._labels = (
            np.fromfile(folder / f"{LABELS}.bin", dtype=np.bool_) if self.about.num_good is not None else None
        )

        self._media: NDArray[np.uint8] | None = None
        self._media_starts: NDArray[np.int64] | None = None
        if self.about.num_media:
            self._media = np.memmap(folder / f"{MEDIA}.bin", np.uint8, "r")
            self._media_starts = np.memmap(folder / f"{MEDIA_STARTS}.bin", np.int64, "r")
        self._margins = np.fromfile(folder / f"{MARGINS}.bin", dtype=np.float32) if self.about.has_margins else None

    def __len__(self) -> int:
        return self.about.num_rows

    @property
    def key(self) -> str:
        """Cache key of the content: two datasets with the same key yield the same batches."""
        return self.folder.name

    @property
    def num_documents(self) -> int:
        return self.about.num_documents

    @property
    def document_lengths(self) -> NDArray[np.int64]:
        """Number of tokens of each document, int64 [num_documents]."""
        return np.diff(self._document_starts)

    @property
    def row_lengths(self) -> NDArray[np.int64]:
        """Number of tokens of each row, without padding, int64 [rows]."""
        # [rows + 1]: where each row begins, in tokens
        return np.diff(self._document_starts[self._row_starts])

    @property
    def member_rows(self) -> dict[str, range]:
        """Row numbers that belong to each dataset of a mixture, by its name; a single dataset has an empty name."""
        return {"": range(len(self))}

    @property
    def longest_document(self) -> int:
        starts = self._document_starts
        blocks = (
            # One start more than documents: the last one is where the block ends.
            starts[begin : begin + BLOCK_DOCUMENTS + 1]
            for begin in range(0, self.num_documents, BLOCK_DOCUMENTS)
        )
        return max(int(np.diff(block).max()) for block in blocks)

    @property
    def num_tokens(self) -> int:
        return self.about.num_tokens

    @property
    def num_target_tokens(self) -> int:
        """Number of tokens that carry loss, in all rows."""
        return self.about.num_target_tokens

    @property
    def padding_fraction(self) -> float | None:
        """Fraction of the positions in all packed rows that is padding; None without packing.

        There a batch is only as wide as its longest row, so the share depends on which rows meet: training measures it.
        """
        if not self.about.packing:
            return None
        return 1 - self.num_tokens / (len(self) * self.about.sequence_length)

    def row_documents(self, row_indices: Sequence[int]) -> NDArray[np.int64]:
        """Return the numbers of the documents in the given packed rows, counted over the whole dataset: int64."""
        return np.concatenate(
            [np.arange(self._row_starts[row], self._row_starts[row + 1]) for row in row_indices] or [np.arange(0)]
        )

    def documents(self, row: int) -> list[tuple[NDArray[np.int32], NDArray[np.bool_]]]:
        """Return the documents of one packed row, each as token ids and loss flags of shape [tokens]."""
        tokens, loss, lengths = self._row(row)
        borders = np.cumsum(lengths)[:-1]
        return list(zip(np.split(tokens, borders), np.split(loss, borders), strict=True))

    def labels(self, row: int) -> list[bool]:
        """Return whether each labelled answer (KTO) in a row is good; an empty list for other kinds of data."""
        return [] if self._labels is None else self._labels[self.row_documents([row])].tolist()

    def margins(self, row: int) -> list[float]:
        """Return how much better the chosen answer of each pair in a row is; 0 if the data has no margins."""
        # Documents 2k (chosen) and 2k + 1 (rejected) are pair k.
        pairs = self.row_documents([row])[0::2] // 2
        return [0.0] * len(pairs) if self._margins is None else self._margins[pairs].tolist()

    @property
    def has_media(self) -> bool:
        return self.about.num_media > 0

    def seen_by(self, see: See, processor: MediaProcessor) -> None:
        """Put the media of documents into each batch from now on, by the given function. processor: of the model."""
        self._see, self._processor = see, processor

    @property
    def media_kinds(self) -> frozenset[MediaKind]:
        return frozenset(one.kind for one in self.distinct_media)

    @property
    def distinct_media(self) -> frozenset[MediaReference]:
        """References to all media, each once; of a mixture, a path begins with the name of its dataset."""
        return frozenset(of_records(b"" if self._media is None else self._media.tobytes()))

    def media(self, row: int) -> list[tuple[MediaReference, ...]]:
        """Return the media of each document of a packed row, in the order of the documents."""
        if self._media is None or self._media_starts is None:
            return [()] * len(self.row_documents([row]))
        starts = ((self._media_starts[number], self._media_starts[number + 1]) for number in self.row_documents([row]))
        return [of_records(self._media[begin:end].tobytes()) for begin, end in starts]

    def media_folder(self, _row: int) -> MediaFolder | None:
        """Return the folder in which the media of a packed row lie; None for text."""
        return self._media_folder

    def patches(self, row: int) -> Mapping[ModelPart, Sequence[int]]:
        """Return the number of patches of each picture, frame of a video and sound of a packed row, by tower."""
        if self._processor is None:
            return {}
        return self._processor.patches_by_tower([one.size for media in self.media(row) for one in media])

    def pictures(self, row: int, sampling: Sampling | None = None) -> list[list[Medium]]:
        """Return the decoded media of each document of a packed row. Raises DataError if one has changed.

        sampling: what a model takes of videos; default: the one of `seen_by`.
        """
        assert self._media_folder, "opened without the folder of its media"
        sampling = sampling or self._processor
        return [[self._media_folder.load(one, sampling) for one in media] for media in self.media(row)]

    @property
    def prompts(self) -> tuple[ToolPrompt, ...]:
        """Prompts with tools or media, of few bytes in all. Raises DataError if a medium has changed."""
        prompts, left = list(self.about.tool_prompts), MOST_PICTURE_BYTES
        for recorded in self.about.picture_prompts:
            pictures = [*map(self._address, recorded.media)]
            if (num_bytes := sum(map(len, pictures))) <= left:
                left -= num_bytes
                prompts.append(recorded.prompt.model_copy(update={"pictures": pictures}))
        return tuple(prompts)

    def _address(self, reference: MediaReference) -> str:
        assert self._media_folder, "opened without the folder of its media"
        return as_address(self._media_folder.load(reference, self._processor))

    def num_row_targets(self, row_indices: Sequence[int]) -> NDArray[np.int64]:
        """Return the number of tokens with loss in each of the given packed rows, int64 [rows]."""
        # Without the first token, which nothing predicts.
        return np.array([self._row(row)[1][1:].sum() for row in row_indices], dtype=np.int64)

    def batch(self, row_indices: Sequence[int], num_rows: int | None = None) -> Batch:
        """Return the rows as a micro-batch on the CPU, padded with empty rows up to `num_rows`.

        It is `sequence_length` wide with packing, else as wide as its longest row.
        """
        batch = self._seen(self._batch([self._row(row) for row in row_indices], num_rows), row_indices)
        if self.about.has_margins:
            margins = [margin for row in row_indices for margin in self.margins(row)]
            batch = batch.with_signal(margins=torch.tensor(margins, dtype=torch.float32))
        if self.about.num_good is None:
            return batch
        labels = [label for row in row_indices for label in self.labels(row)]
        return batch.with_signal(is_good=torch.tensor(labels, dtype=torch.bool))

    def mismatched(self, row_indices: Sequence[int], num_rows: int | None = None) -> Batch:
        """Return the rows as a batch in which each prompt is followed by another prompt's answer, for KTO.

        The same answers are there as targets, and a row is as long as before. A document that is alone in its row gets
        the answer of one in the row before, cut to fit.
        """
        batch = self._batch([self._mismatched_row(row) for row in row_indices], num_rows)
        return self._seen(batch, row_indices)  # pictures are of prompts, which stay

    def _seen(self, batch: Batch, row_indices: Sequence[int]) -> Batch:
        """Return the batch with the pictures of its rows' documents, if the dataset has pictures."""
        if self._see is None:
            return batch
        return self._see(batch, [pictures for row in row_indices for pictures in self.pictures(row)])

    def _mismatched_row(self, row: int) -> Row:
        documents = self.documents(row)
        # Answers move on by one document within the row; the first document gets the last one's.
        before = documents[-1] if len(documents) > 1 else self.documents((row - 1) % len(self))[-1]
        joined = []
        for (tokens, loss), (other, other_loss) in zip(documents, [before, *documents[:-1]], strict=True):
            # `argmax` of booleans is the first True: the first learned token, where the answer begins.
            own, answer = int(loss.argmax()), int(other_loss.argmax())
            joined.append((np.append(tokens[:own], other[answer:]), np.append(loss[:own], other_loss[answer:])))
        # Only a document alone in its row may be too long now: in a longer row the sum of lengths stays.
        cut = [(tokens[: self.about.sequence_length], loss[: self.about.sequence_length]) for tokens, loss in joined]
        lengths = np.array([len(tokens) for tokens, _ in cut])
        return np.concatenate([tokens for tokens, _ in cut]), np.concatenate([loss for _, loss in cut]), lengths

    def _batch(self, rows: list[Row], num_rows: int | None) -> Batch:
        longest = max((len(tokens) for tokens, _, _ in rows), default=2)
        width = self.about.sequence_length if self.about.packing else longest
        return packed_batch(rows, (num_rows or len(rows), width), self.about.padding_token)

    def _row(self, row: int) -> Row:
        # [documents + 1]: the last one is where the next row begins.
        starts = self._document_starts[self._row_starts[row] : self._row_starts[row + 1] + 1]
        tokens = slice(starts[0], starts[-1])
        return self._tokens[tokens], self._loss[tokens], np.diff(starts)


def packed_batch(rows: Sequence[Row], shape: tuple[int, int], padding_token: int) -> Batch:
    """Return a micro-batch of `shape` [rows, sequence] on the CPU; rows that are shorter are padded."""
    input_ids = np.full(shape, padding_token, dtype=np.int64)
    targets = np.full(shape, IGNORED, dtype=np.int64)
    for row, (tokens, loss, _) in enumerate(rows):
        input_ids[row, : len(tokens)] = tokens
        # A position's target is the next token; the flag of that token says whether it is learned.
        targets[row, : len(tokens) - 1] = np.where(loss[1:], tokens[1:], IGNORED)
    segments = _Segments([lengths for _, _, lengths in rows], shape)
    return Batch.of(
        input_ids=torch.from_numpy(input_ids),
        targets=torch.from_numpy(targets),
        position_ids=torch.from_numpy(segments.position_ids),
        documents=Documents(torch.from_numpy(segments.document_ids), segments.num_documents, segments.lengths.tolist()),
    )


class _Segments:
    """Positions and document numbers of all tokens of a batch, int64 [rows, sequence]; padding counts as documents."""

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
            # Padding is a document of its own, numbered after all real ones: no real token attends to it.
            if left := width - sum(row):
                lengths.append(left)
                numbers.append(padding)
                padding += 1
        self.lengths = np.array(lengths)
        # [segments]: each segment's first place in the flattened rows.
        starts = np.cumsum(self.lengths) - self.lengths
        # lengths [3, 2] -> positions [0, 1, 2, 0, 1]
        self.position_ids = (np.arange(num_rows * width) - np.repeat(starts, self.lengths)).reshape(shape)
        self.document_ids = np.repeat(np.array(numbers), self.lengths).reshape(shape)


def row_order(num_rows: int, seed: int, epoch: int, number: int = 0) -> NDArray[np.int64]:
    """Return an epoch's shuffled order of rows, int64 [num_rows], in all layouts. number: of the mixture's dataset."""
    # The first dataset has the seed of a training without a mixture, and so the same order.
    return np.random.default_rng([seed, epoch, *([number] if number else [])]).permutation(num_rows)
