"""What a teacher says of the targets of a dataset: its likeliest tokens, computed once and cached by content.

A teacher is a server, or a model that is loaded before the one that learns, under the same layout, and freed: only one
model is held at a time, unless the teacher is asked on about what the model answers. The cache is an array on disk, a
record a target, under a name made of everything that decides it.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import JsonValue

from stages.core.contract import StageContext, is_main_process
from stages.data.batch import Batch
from stages.data.cache import content_key, is_intact, is_sealed, write_seal
from stages.data.dataset import PackedDataset
from stages.engines.engine import Engine
from stages.kinds.train.check_model import check_model
from stages.kinds.train.checkpoints import check_free_disk
from stages.kinds.train.config import TrainConfig
from stages.kinds.train.methods.method import TeacherTokens
from stages.kinds.train.order import even_micro_batches
from stages.kinds.train.reference import model_digest
from stages.kinds.train.teacher_rows import OpenTeacher, ShareOf, TeacherRows, said_record
from stages.kinds.train.teacher_server import ServedTeacher
from stages.kinds.train.watchdog import Watchdog
from stages.models.model_config import read_config
from stages.models.model_folder import vocabulary_size
from stages.models.shape import ModelShape
from stages.parallel.processes import gathered

BuildEngine = Callable[[TrainConfig, Path, ModelShape | None], Engine]
"""(what a stage says, folder of a model, its shape) → an engine with that model"""
RowsOf = tuple[PackedDataset, Sequence[int]]
"""A dataset, and rows of it, sorted and without repetitions."""


class Teacher(Protocol):
    """Who is asked. identity: everything that decides what it says, beside what it is asked about."""

    @property
    def identity(self) -> dict[str, JsonValue]: ...

    def opened(self, context: StageContext, watchdog: Watchdog) -> AbstractContextManager[OpenTeacher]:
        """Not called where everything is cached. Collective."""


@dataclass(frozen=True)
class TeacherModel:
    """A model that is asked, and not trained. build: loads it."""

    weights_digest: str
    asked: TeacherTokens
    precision: str
    micro_batch_size: int
    build: Callable[[], Engine]

    @property
    def identity(self) -> dict[str, JsonValue]:
        return {"weights": self.weights_digest, "temperature": self.asked.temperature, "precision": self.precision}

    @contextmanager
    def opened(self, context: StageContext, watchdog: Watchdog) -> Iterator[OpenTeacher]:
        watchdog.begins("loading the teacher")
        engine = self.build()
        try:
            yield OpenModel(engine, self.asked, self.micro_batch_size, context, watchdog)
        finally:
            engine.close()


@dataclass(frozen=True)
class OpenModel:
    """See `OpenTeacher`."""

    engine: Engine
    asked: TeacherTokens
    micro_batch_size: int
    context: StageContext
    watchdog: Watchdog

    def of_rows(self, dataset: PackedDataset, rows: Sequence[int]) -> Iterator[NDArray[np.void]]:
        """Round by round: in each, every share of the processes has a micro-batch."""
        engine, starts = self.engine, _starts(dataset, rows)
        size = self.micro_batch_size * engine.data_parallel_size
        shares = list(even_micro_batches(len(rows), self.micro_batch_size, engine.data_rank, engine.data_parallel_size))
        for index, share in enumerate(shares):
            self.watchdog.begins(f"micro-batch {index + 1} of {len(shares)} of the teacher")
            own = self._of_batch(dataset.batch([rows[position] for position in share], self.micro_batch_size))
            first, last = starts[index * size], starts[min((index + 1) * size, len(rows))]
            of_round = torch.zeros(int(last - first), 2, self.asked.number, dtype=torch.float64)
            if share:
                of_round[int(starts[share[0]] - first) : int(starts[share[-1] + 1] - first)] = own
            yield _recorded(engine.sum_over_data(of_round))
            self.context.progress(index + 1, len(shares), "micro-batches", "the teacher's likeliest tokens")

    def of_share(self, share_of: ShareOf, data_rank: int, num_shares: int) -> list[NDArray[np.void]]:
        return [_recorded(self._of_batch(batch)) for batch in share_of(data_rank)]

    def _of_batch(self, batch: Batch) -> torch.Tensor:
        """float64 [targets, 2, number]: tokens and log-probabilities."""
        answer = self.engine.likeliest_tokens(replace(batch, temperature=self.asked.temperature), self.asked.number)
        return torch.stack([values[batch.has_target].double() for values in answer], 1)


def _recorded(values: torch.Tensor) -> NDArray[np.void]:
    """`said_record` [targets] of [targets, 2, number]."""
    said = np.zeros(len(values), said_record(values.shape[-1]))
    said["tokens"], said["log_probabilities"] = values.unbind(1)
    return said


@dataclass(frozen=True)
class Taught:
    """What a teacher said of datasets' rows; and itself, if it is to be asked about more."""

    rows: Mapping[PackedDataset, TeacherRows] = field(default_factory=dict)
    teacher: OpenTeacher | None = None
    is_whole_vocabulary: bool = False


def ask_teacher(
    config: TrainConfig,
    context: StageContext,
    wanted: Sequence[RowsOf],
    start_digest: str,
    watchdog: Watchdog,
    build: BuildEngine,
    stays: ExitStack,
) -> Taught:
    """What the teacher that a recipe's stage names says of each dataset's rows; collective.

    start_digest: of the weights that training starts from. stays: what ends a teacher that is asked on. Raises
    ModelError or LayoutError for a teacher that the engine or the layout does not allow, ServerError or TransientError
    for a server that does not answer as it should.
    """
    asked = config.teacher_tokens
    assert asked
    teacher = _teacher(config, context, start_digest, build)
    model_folder = context.inputs[config.base or config.model] / "model"
    paths = [_path(teacher, asked, dataset, rows, context.cache) for dataset, rows in wanted]
    missing = [index for index, path in enumerate(paths) if not min(gathered(float(is_intact(path))))]
    for index in missing:
        if is_sealed(paths[index]):
            context.warn(f"the teacher's tokens: {paths[index]} held other bytes than were written: asked again")
    with ExitStack() as stack:
        opened = stack.enter_context(teacher.opened(context, watchdog)) if missing or config.on_policy else None
        for index in missing:
            assert opened
            _write(opened, asked.number, *wanted[index], paths[index])
        if config.on_policy:
            stays.push(stack.pop_all())
        else:
            opened = None
    is_whole = asked.number == vocabulary_size(read_config(model_folder))
    rows = {
        dataset: TeacherRows(np.array(rows), _starts(dataset, rows), np.load(path, mmap_mode="r"), asked, is_whole)
        for (dataset, rows), path in zip(wanted, paths, strict=True)
    }
    return Taught(rows, opened, is_whole)


def _teacher(config: TrainConfig, context: StageContext, start_digest: str, build: BuildEngine) -> Teacher:
    asked = config.teacher_tokens
    assert asked
    if asked.server:
        return ServedTeacher.of(asked, config.execution)
    assert config.teacher
    folder = context.inputs[config.teacher] / "model"
    alone = config.model_copy(update={"adapter": None, "base": None})
    shape, digest = check_model(alone, context, folder), model_digest(folder)
    if digest == start_digest:
        context.warn(f"the teacher, {config.teacher}, is the model that training starts from: there is little to learn")
    size = config.layout.micro_batch_size
    return TeacherModel(digest, asked, config.precision, size, lambda: build(alone, folder, shape))


def _path(teacher: Teacher, asked: TeacherTokens, dataset: PackedDataset, rows: Sequence[int], cache: Path) -> Path:
    identity: dict[str, JsonValue] = {
        **teacher.identity,
        "data": dataset.key,
        "rows": hashlib.sha256(np.array(rows, dtype=np.int64).tobytes()).hexdigest(),
        "number": asked.number,
    }
    return cache / "teacher" / f"{content_key(identity)}.npy"


def _write(teacher: OpenTeacher, number: int, dataset: PackedDataset, rows: Sequence[int], path: Path) -> None:
    """What the teacher says, as it comes; by rank 0 alone."""
    array = _new_file(path, number, int(_starts(dataset, rows)[-1])) if is_main_process() else None
    first = 0
    for piece in teacher.of_rows(dataset, rows):
        if array is not None:
            array[first : first + len(piece)] = piece
            first += len(piece)
    if array is not None:
        assert first == len(array), "the teacher said something of every target"
        array.flush()
        _unfinished(path).replace(path)
        write_seal(path)
    gathered(0.0)  # the others read what the first process has written


def _new_file(path: Path, number: int, num_targets: int) -> np.memmap:
    path.parent.mkdir(parents=True, exist_ok=True)
    record = said_record(number)
    check_free_disk(path.parent, num_targets * record.itemsize, "teacher's likeliest tokens (distill.loss_top_k)")
    return np.lib.format.open_memmap(_unfinished(path), mode="w+", dtype=record, shape=(num_targets,))


def _starts(dataset: PackedDataset, rows: Sequence[int]) -> NDArray[np.int64]:
    return np.concatenate([[0], dataset.num_row_targets(rows).cumsum()])


def _unfinished(path: Path) -> Path:
    return path.with_name(f".{path.name}.{os.getpid()}.npy")
