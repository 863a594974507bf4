"""Preparation of training data: rows of a dataset become packed rows of tokens on disk, cached by content.

Every step is a generator over the one before it, so that memory stays flat. What is found in the rows of each part is
stored with its pieces, and judged when all rows were seen. A mixture's datasets are prepared each alone.
"""

from __future__ import annotations

import os
import shutil
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, nullcontext
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from stages.core.cache import cached_folder, content_key, file_digest, is_intact, is_sealed, write_seal
from stages.core.contract import is_main_process
from stages.core.errors import DataError, full_disk_named
from stages.core.files import write_atomically
from stages.data.any_rows import check_formats
from stages.data.bad_rows import BadRows, write_list
from stages.data.config import ROW_KINDS, DataConfig, RowKind
from stages.data.dataset import (
    ABOUT,
    ARRAYS,
    LABELS,
    MARGINS,
    MEDIA,
    MEDIA_STARTS,
    Description,
    PackedDataset,
    is_described,
)
from stages.data.files import Portion, RowLocation, find_files, name_of, portions
from stages.data.formats import RowReader
from stages.data.media.folder import MediaFolder
from stages.data.media.prompts import MOST_PROMPTS, PicturePrompt
from stages.data.media_reference import of_records
from stages.data.mixture import joined
from stages.data.patches import PatchBound
from stages.data.row_fields import IgnoredFields
from stages.data.seen_rows import SeenRows, check_held_out, rows_in_any_order
from stages.data.tokenized_rows import FileState, Reporter, TokenizedRowsSource
from stages.data.tokenizer import TokenizerNotes
from stages.data.tokenizing import TokenizedRows, Tokenizing, key_parts, over_long_of
from stages.data.units import PackedRows, Unit, Units, cut, pack
from stages.models.facts import ModelFacts
from stages.models.media import MediaKind, MediaSize, ModelPart
from stages.models.processor_files import reads_media
from stages.models.recorded import ToolPrompt

BAD_ROWS = "bad_rows.jsonl"
NO_STOP = (
    "the chat template ends what the assistant says without a special token, so the model will not learn to stop; "
    "fix the template, or give another one (`chat_template`)"
)
CACHE_FOLDER = "tokenized"
PIECES_FOLDER = "pieces"
BUFFER_BYTES = 1 << 20


@dataclass(frozen=True)
class PreparedData:
    """Packed training rows and held-out rows of a training on disk, which all its processes open."""

    training: PackedDataset
    evaluation: PackedDataset | None
    """Held-out rows for evaluation; None if the recipe holds out none."""

    @property
    def datasets(self) -> list[PackedDataset]:
        return [dataset for dataset in (self.training, self.evaluation) if dataset]

    @property
    def longest_document(self) -> int:
        return max(dataset.longest_document for dataset in self.datasets)

    @property
    def has_media(self) -> bool:
        return any(dataset.has_media for dataset in self.datasets)

    @property
    def media_kinds(self) -> frozenset[MediaKind]:
        """Kinds of all media of training and held-out rows."""
        return frozenset().union(*(dataset.media_kinds for dataset in self.datasets))


def prepare(
    folder: Path,
    config: DataConfig,
    model: ModelFacts,
    *,
    rows: RowKind,
    cache: Path,
    report: Reporter,
    bad_rows_file: Path,
) -> PreparedData:
    """Read, check, render, tokenize and pack the rows of a dataset, or reuse the result in the cache.

    folder: the dataset artifact's `data/`. rows: kind of row that the training method learns from. bad_rows_file: JSONL
    list of the rows that `on_bad_rows: drop` leaves out, if any. Safe when several processes prepare the same: one
    works, the others wait. Raises DataError for data that cannot be learned from, ModelError for a folder without a
    usable tokenizer and ResourceError for a full disk.
    """
    datasets = [
        prepare_portion(
            Preprocessing(
                portion,
                folder,
                find_files(folder, portion.split),
                config,
                model,
                rows,
                report,
                cache / PIECES_FOLDER,
            ),
            cache / CACHE_FOLDER,
        )
        for portion in portions(config)
    ]
    if is_main_process():
        write_list(bad_rows_file, [dataset.folder / BAD_ROWS for dataset in datasets])
    if len(datasets) > 1 and (warning := check_held_out(*(dataset.folder for dataset in datasets))):
        report.warn(warning)
    return PreparedData(datasets[0], datasets[1] if len(datasets) > 1 else None)


def prepare_mixture(
    inputs: Mapping[str, Path],
    config: DataConfig,
    model: ModelFacts,
    *,
    rows: RowKind,
    cache: Path,
    report: Reporter,
    work: Path,
) -> PreparedData:
    """Prepare the dataset of a training, or each dataset of a mixture, as `prepare` does.

    inputs: folders of artifacts by stage. work: folder for `bad_rows.jsonl`; in a mixture `bad_rows.NAME.jsonl`. Raises
    DataError also where no method learns from all together, and as `check_together`.
    """
    names, is_mixture = config.names, config.is_mixture
    if is_mixture:
        check_formats(inputs, config, rows)
    prepared: dict[str, PreparedData] = {}
    for name, part in zip(names, config.parts.values(), strict=True):
        with naming_dataset(name) if is_mixture else nullcontext():
            prepared[name] = prepare(
                inputs[part.dataset_stage] / "data",
                part,
                model,
                rows=rows,
                cache=cache,
                report=_NamedReporter(report, name) if is_mixture else report,
                bad_rows_file=work / (f"bad_rows.{name}.jsonl" if is_mixture else "bad_rows.jsonl"),
            )
    held_out = {name: one.evaluation for name, one in prepared.items() if one.evaluation}
    training = {name: one.training for name, one in prepared.items()}
    for warning in check_together(training, held_out):
        report.warn(warning)
    return PreparedData(joined(training), joined(held_out) if held_out else None)


def prepare_portion(task: Preprocessing, cache: Path) -> PackedDataset:
    """Return the training rows or the held-out rows of a dataset as packed tokens, from the cache or made now."""
    names = {path: name_of(path, task.folder) for path in task.files}
    states = {path: FileState.of(path) for path in names}
    key = content_key(
        {
            **key_parts(task.portion, task.config, task.model.folder, task.rows, task.media),
            "files": {name: file_digest(path) for path, name in names.items()},
            **({} if task.config.max_patches is None else {"max_patches": task.config.max_patches}),
        }
    )

    damaged: set[Path] = set()

    def is_usable(folder: Path) -> bool:
        if is_described(folder) and is_intact(folder):
            return True
        if is_sealed(folder):
            damaged.add(folder)
        return False

    def make(target: Path) -> None:
        task.run(target)
        for path, state in states.items():
            # Before the seal: the key is of what the files held at the beginning.
            state.check(path, names[path])
        write_seal(target)

    with full_disk_named("writing tokenized data", cache):
        dataset = PackedDataset(cached_folder(cache, key, is_usable, make), task.media)
    for folder in damaged:
        task.report.warn(f"{task.portion.name} data: {folder} held other bytes than were written, and was made again")
    for warning in dataset.about.warnings:
        task.report.warn(f"{task.portion.name} data: {warning}")
    return dataset


@dataclass(frozen=True)
class Preprocessing:
    """Task of preparing the training or the held-out rows of a dataset, with all inputs that decide the result.

    pieces: folder of stored tokenized pieces; it may not exist yet. time_limit_s: CPU time from the first row on. part:
    folder for the rows so far when the time is over, as if they were all.
    """

    portion: Portion
    folder: Path
    files: list[Path]
    config: DataConfig
    model: ModelFacts
    rows: RowKind
    report: Reporter
    pieces: Path
    time_limit_s: float | None = None
    part: Path | None = None

    @cached_property
    def media(self) -> MediaFolder | None:
        """Folder of the rows' media; None for a model that reads text alone."""
        return MediaFolder.of(self.folder, self.files) if reads_media(self.model.folder) else None

    def run(self, target: Path) -> None:
        """Write the packed rows into the empty folder `target`. Raises DataError, ModelError, OutOfTimeError."""
        with (
            (target / BAD_ROWS).open("w", encoding="utf-8") as stream,
            closing(
                DatasetWriter(
                    target, is_labelled=ROW_KINDS[self.rows].has_labels, may_have_media=self.media is not None
                )
            ) as writer,
        ):
            seen = SeenRows(target, is_labelled=ROW_KINDS[self.rows].has_labels)
            run = _Run(self, BadRows(stream), writer, seen)
            run.write()
        if run.last_in_time:
            assert self.part
            # Out of the cache, which removes what a failed `make` leaves.
            shutil.move(target, self.part)
            raise OutOfTimeError(run.last_in_time)


class _Run:
    """One pass over a dataset's tokenized data, which packs rows and counts bad, long and repeated ones."""

    def __init__(self, task: Preprocessing, bad_rows: BadRows, writer: DatasetWriter, seen: SeenRows) -> None:
        config = task.config
        self._task = task
        self._config = config
        self._bad_rows = bad_rows
        self._writer = writer
        reader = RowReader(config.format, task.rows, config.columns, task.media)
        tokenizing = Tokenizing(task.portion, config, task.model, task.rows, reader, task.media)
        self._source = TokenizedRowsSource(
            tokenizing, task.folder, task.files, task.pieces, task.report, task.time_limit_s
        )
        self._tokenizer = self._source.tokenizer.tokenizer
        # The processor is made for the first picture.
        writer.patches_by_tower = lambda sizes: self._tokenizer.processor.patches_by_tower(sizes)
        self._unread = IgnoredFields()
        self._notes = TokenizerNotes()
        self._seen = seen
        self._over_long = over_long_of(config)
        self._bound = PatchBound(config, lambda size: self._tokenizer.processor.patches(size))
        self._num_text_tokens = 0
        self._num_text_bytes = 0
        self._num_source_rows = 0
        self._num_tokenized_rows = 0
        self._tool_prompts: tuple[ToolPrompt, ...] = ()
        self._picture_prompts: tuple[PicturePrompt, ...] = ()

    def write(self) -> None:
        units = (self._bound.within(piece.units) for piece in self._counted())
        for rows in self._packed(units):
            self._writer.write_rows(*rows)
        if self.last_in_time and not self._task.part:
            self._check_so_far()
            raise OutOfTimeError(self.last_in_time)
        # Only now: packing has drawn the last piece, so all counts are complete.
        warnings = self._check()
        self._seen.close()
        self._writer.finish(
            Description(
                sequence_length=self._config.sequence_length,
                packing=bool(self._config.packing),
                padding_token=self._tokenizer.padding_token,
                num_media=self._writer.num_media,
                num_patches=self._writer.num_patches,
                most_patches=self._writer.most_patches,
                num_frames=self._writer.num_frames,
                num_sounds=self._writer.num_sounds,
                num_sound_frames=self._writer.num_sound_frames,
                most_sound_frames=self._writer.most_sound_frames,
                num_rows=self._writer.num_rows,
                num_documents=self._writer.num_documents,
                num_tokens=self._writer.num_tokens,
                num_target_tokens=self._writer.num_target_tokens,
                num_source_rows=self._num_source_rows,
                num_bad_rows=self._bad_rows.num_rows,
                num_over_long=self._over_long.num_over_long,
                conversations=self._notes.teaches_to_stop is not None,
                num_good=self._writer.num_good if ROW_KINDS[self._task.rows].has_labels else None,
                has_margins=self._writer.has_margins,
                bytes_per_token=self._num_text_bytes / self._num_text_tokens if self._config.packing == "cut" else None,
                warnings=warnings,
                tool_prompts=self._tool_prompts,
                picture_prompts=self._picture_prompts,
            )
        )

    def _packed(self, units: Iterable[Units]) -> Iterable[PackedRows]:
        if self._config.packing == "cut":
            return cut(units, self._config.sequence_length)
        if not self._config.packing:
            return map(_alone, units)
        return pack(units, self._config.sequence_length, self._bound.sizes)

    def _counted(self) -> Iterator[TokenizedRows]:
        for part, piece in self._source.pieces():
            notes = piece.notes
            self._num_source_rows += notes.num_source_rows
            self._num_tokenized_rows += notes.num_tokenized_rows
            self._num_text_tokens += notes.num_text_tokens
            self._num_text_bytes += notes.num_text_bytes
            for bad in piece.bad_rows(part):
                self._bad_rows.add(bad)
            self._over_long.add(piece.over_long(part, self._over_long))
            self._seen.add(part, piece.digests, piece.swapped, piece.numbers, notes.remarkable)
            self._unread.counts += Counter(notes.unread)
            self._notes = self._notes.then(notes.tokenizer)
            self._tool_prompts = self._tool_prompts or ((notes.tool_prompt,) if notes.tool_prompt else ())
            self._picture_prompts = (*self._picture_prompts, *notes.picture_prompts)[:MOST_PROMPTS]
            yield piece

    @property
    def last_in_time(self) -> RowLocation | None:
        """Last row that was read if the time limit ended reading early; None if all rows were read."""
        return self._source.last_in_time

    def _check_so_far(self) -> None:
        """Raise DataError if the rows read so far have faults that the recipe forbids, so that reading stops."""
        if self._config.on_bad_rows == "fail":
            allowed = self._config.max_bad_row_fraction
            self._bad_rows.check("fail", allowed, self._num_source_rows, is_whole=False)
        if self._config.over_long == "fail":
            self._over_long.check(self._num_tokenized_rows)
            self._bound.check()

    def _check(self) -> tuple[str, ...]:
        """Return warnings about the rows; raise DataError for faults that the recipe forbids, or if no row is left."""
        config, portion = self._config, self._task.portion
        if not self._num_source_rows:
            cause = f"evaluation_fraction {portion.fraction} leaves" if portion.fraction else "there are"
            raise DataError(
                f"no {portion.name} rows: {cause} none in {', '.join(path.name for path in self._task.files)} of "
                f"{self._task.folder}"
            )
        warnings = (
            self._bad_rows.check(config.on_bad_rows, config.max_bad_row_fraction, self._num_source_rows),
            self._over_long.check(self._num_tokenized_rows),
            self._bound.check(),
            NO_STOP if self._notes.teaches_to_stop is False else None,
            *self._tokenizer.warnings(self._notes),
            self._unread.warning(),
            *self._seen.warnings(),
        )
        if not self._writer.num_rows:
            if config.packing == "cut" and self._num_text_tokens:
                warnings = (
                    *warnings,
                    f"all texts together have {self._num_text_tokens} tokens, less than `sequence_length`",
                )
            raise DataError(f"no {portion.name} rows are left: {'; '.join(filter(None, warnings))}")
        self._check_labels()
        return tuple(filter(None, warnings))

    def _check_labels(self) -> None:
        """Raise DataError if all labelled answers (KTO) are good or all are bad, so that nothing can be compared."""
        num_good, num_rows = self._writer.num_good, self._writer.num_documents
        if (
            ROW_KINDS[self._task.rows].has_labels
            and self._task.portion.name == "training"
            and num_good in (0, num_rows)
        ):
            raise DataError(
                f"all {num_rows} training rows have `label: {str(num_good > 0).lower()}`; expected good and bad "
                "answers, to learn the difference; add the others, or learn from good ones alone (`method: sft`)"
            )


def _alone(units: Units) -> PackedRows:
    return units, [1] * len(units)


class OutOfTimeError(Exception):
    """Raised when preparing data reached its time limit. `last` is the last row that was read and checked."""

    def __init__(self, last: RowLocation) -> None:
        super().__init__(f"after {last}")
        self.last = last


def check_together(training: Mapping[str, PackedDataset], held_out: Mapping[str, PackedDataset]) -> list[str]:
    """Return warnings about rows that one dataset of a mixture trains on while another one holds them out.

    Raises DataError for a copy of another dataset , and where all held-out rows of one are learned from another.
    """
    known: dict[tuple[int, ...], str] = {}
    for name, dataset in training.items():
        first = known.setdefault(rows_in_any_order(dataset.folder), name)
        if first != name:
            raise DataError(
                f"{first} and {name} have the same rows, which would be there twice; name one of them, with the weight "
                "of both"
            )
    warnings = []
    for name, dataset in held_out.items():
        for other in (other for other in training if other != name):
            try:
                warning = check_held_out(training[other].folder, dataset.folder)
            except DataError as error:
                raise DataError(f"{name} holds out what is learned from {other}: {error}") from error
            warnings += [f"{name} holds out what is learned from {other}: {warning}"] if warning else []
    return warnings


@contextmanager
def naming_dataset(name: str) -> Iterator[None]:
    """Add the name of a mixture's dataset to the message of a DataError raised in the `with` block."""
    try:
        yield
    except DataError as error:
        raise DataError(f"{name}: {error}") from error


@dataclass(frozen=True)
class _NamedReporter:
    """Receiver of progress and warnings about a mixture that adds the dataset's name to each message."""

    report: Reporter
    name: str

    def progress(self, done: float, total: float, unit: str, message: str = "") -> None:
        self.report.progress(done, total, unit, f"{message} of {self.name}")

    def warn(self, message: str) -> None:
        self.report.warn(f"{self.name}: {message}")


class DatasetWriter:
    """Writer of packed rows to the array files of a folder; `finish` adds the description that completes it."""

    patches_by_tower: Callable[[Sequence[MediaSize]], Mapping[ModelPart, Sequence[int]]]

    def __init__(self, folder: Path, *, is_labelled: bool = False, may_have_media: bool = False) -> None:
        self._folder = folder
        self._is_labelled = is_labelled
        names = [*ARRAYS, LABELS if is_labelled else MARGINS, *((MEDIA, MEDIA_STARTS) if may_have_media else ())]
        self._streams = {name: (folder / f"{name}.bin").open("wb", buffering=BUFFER_BYTES) for name in names}
        self.num_rows = 0
        self.num_documents = 0
        self.num_tokens = 0
        self.num_target_tokens = 0
        self.num_good = 0
        self.has_margins = False
        self.num_media = 0
        self.num_patches = 0
        self.most_patches = 0
        self.num_frames = 0
        self.num_sounds = 0
        self.num_sound_frames = 0
        self.most_sound_frames = 0
        self._num_media_bytes = 0
        if may_have_media:
            self._streams[MEDIA_STARTS].write(np.zeros(1, np.int64).tobytes())
        self._append("document_starts", np.zeros(1))
        self._append("row_starts", np.zeros(1))

    def close(self) -> None:
        """Close the array files; unless `finish` was called before, the folder stays incomplete."""
        for stream in self._streams.values():
            stream.close()

    def write_row(self, units: Sequence[Unit]) -> None:
        """Append one packed row, made of training units (documents or pairs). Raises ResourceError for a full disk."""
        has_margins = any(unit.margin is not None for unit in units)
        self.write_rows(Units.of(units, is_labelled=self._is_labelled, has_margins=has_margins), [len(units)])

    def write_rows(self, units: Units, units_of_rows: Sequence[int]) -> None:
        """Append packed rows, given their units and the number of units per row; ResourceError for a full disk."""
        # units_of_rows [2, 1] -> rows [0, 2, 3]: where each row begins, in units
        rows = np.concatenate([[0], np.cumsum(units_of_rows)]).astype(np.int64)
        documents_before = np.concatenate([[0], np.cumsum(units.num_documents)])
        # Ends are appended: each is where the next row, or document, begins. The first start, 0, is there already.
        self._append("row_starts", self.num_documents + documents_before[rows[1:]])
        self._append("document_starts", self.num_tokens + np.cumsum(units.document_lengths))
        self._append("tokens", units.tokens)
        self._append("loss", units.loss)
        self.num_rows += len(units_of_rows)
        self.num_documents += len(units.document_lengths)
        self.num_tokens += len(units.tokens)
        self.num_target_tokens += int(units.loss.sum())
        if units.margins is not None and len(units):
            self.has_margins = True
            self._streams[MARGINS].write(units.margins.tobytes())
        if units.media is not None and units.media_lengths is not None:
            self._streams[MEDIA].write(units.media.tobytes())
            self._streams[MEDIA_STARTS].write((self._num_media_bytes + np.cumsum(units.media_lengths)).tobytes())
            self._num_media_bytes += len(units.media)
            self._count_media(units.media, units.media_lengths, documents_before[rows])
        if units.labels is not None:
            self._streams[LABELS].write(units.labels.tobytes())
            self.num_good += int(units.labels.sum())

    def _count_media(
        self, media: NDArray[np.uint8], lengths: NDArray[np.int64], documents_before: NDArray[np.int64]
    ) -> None:
        """Count media and their patches. lengths: bytes of each document. documents_before: before each row."""
        begins = np.concatenate([[0], np.cumsum(lengths)])[documents_before]
        for begin, end in pairwise(begins.tolist()):
            found = of_records(media[begin:end].tobytes())
            by_tower = self.patches_by_tower([one.size for one in found])
            seen, heard = by_tower["vision_tower"], by_tower["audio_tower"]
            self.num_media += len(found)
            self.num_frames += len(seen)
            self.num_patches += sum(seen)
            self.most_patches = max(self.most_patches, sum(seen))
            self.num_sounds += len(heard)
            self.num_sound_frames += sum(heard)
            self.most_sound_frames = max(self.most_sound_frames, sum(heard))

    def finish(self, about: Description) -> None:
        """Flush all arrays to disk, then write the description that makes the folder complete."""
        for stream in self._streams.values():
            stream.flush()
            os.fsync(stream.fileno())
        write_atomically(self._folder / ABOUT, about.model_dump_json(indent=2))

    def _append(self, array: str, values: NDArray[np.generic]) -> None:
        self._streams[array].write(values.astype(ARRAYS[array], copy=False).tobytes())
