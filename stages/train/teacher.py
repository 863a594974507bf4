"""What a teacher says of the targets of a dataset: its likeliest tokens, computed once and cached by content.

The teacher is loaded before the model that learns, under the same layout, and freed: only one model is held at a time.
The cache is an array on disk, a record a target, under a name made of everything that decides it.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import JsonValue

from stages.core.contract import StageContext, is_main_process
from stages.data.batch import Batch, Candidates
from stages.data.cache import content_key
from stages.data.dataset import PackedDataset
from stages.engines.engine import Engine
from stages.models.config_check import vocabulary_size
from stages.models.model_config import read_config
from stages.models.shape import ModelShape
from stages.parallel.processes import gathered
from stages.train.check_model import check_model
from stages.train.checkpoints import check_free_disk
from stages.train.config import TrainConfig
from stages.train.methods.method import TeacherTokens
from stages.train.order import even_micro_batches
from stages.train.reference import model_digest
from stages.train.watchdog import Watchdog

BuildEngine = Callable[[TrainConfig, Path, ModelShape | None], Engine]
"""(what a stage says, folder of a model, its shape) → an engine with that model"""
RowsOf = tuple[PackedDataset, Sequence[int]]
"""A dataset, and rows of it, sorted and without repetitions."""


@dataclass(frozen=True)
class TeacherRows:
    """Rows of a dataset with what the teacher says of their targets."""

    rows: NDArray[np.int64]
    """int64 [rows], sorted: their numbers in the dataset"""
    starts: NDArray[np.int64]
    """int64 [rows + 1]: where the targets of each begin among `said`"""
    said: NDArray[np.void]
    """[targets] of `tokens`, int32 [k], and `log_probabilities`, float32 [k]; mapped from disk"""
    asked: TeacherTokens
    is_whole_vocabulary: bool

    def attach(self, batch: Batch, rows: Sequence[int]) -> Batch:
        """The batch, made of these rows, with its candidates."""
        found = np.searchsorted(self.rows, rows)
        said = np.concatenate([self.said[:0], *(self.said[self.starts[one] : self.starts[one + 1]] for one in found)])
        shape = (*batch.targets.shape, self.asked.number)
        tokens, values = torch.zeros(shape, dtype=torch.int64), torch.zeros(shape)
        tokens[batch.has_target] = torch.from_numpy(said["tokens"].astype(np.int64))
        values[batch.has_target] = torch.from_numpy(np.ascontiguousarray(said["log_probabilities"]))
        candidates = Candidates(tokens, values, self.is_whole_vocabulary)
        return replace(batch, candidates=candidates, temperature=self.asked.temperature)


@dataclass(frozen=True)
class TeacherModel:
    """A model that is asked, and not trained."""

    weights_digest: str
    vocabulary: int | None
    """Its entries, where its config says how many they are."""
    asked: TeacherTokens
    precision: str
    micro_batch_size: int
    context: StageContext
    watchdog: Watchdog
    build: Callable[[], Engine]
    """Loads it; not called where everything is cached."""

    def rows(self, wanted: Sequence[RowsOf]) -> list[TeacherRows]:
        """What it says of each of these; collective."""
        paths = [self._path(dataset, rows) for dataset, rows in wanted]
        missing = [index for index, path in enumerate(paths) if not min(gathered(float(path.is_file())))]
        if missing:
            self.watchdog.begins("loading the teacher")
            engine = self.build()
            for index in missing:
                self._compute(engine, *wanted[index], paths[index])
            engine.close()
        whole = self.asked.number == self.vocabulary
        return [
            TeacherRows(np.array(rows), _starts(dataset, rows), np.load(path, mmap_mode="r"), self.asked, whole)
            for (dataset, rows), path in zip(wanted, paths, strict=True)
        ]

    def _path(self, dataset: PackedDataset, rows: Sequence[int]) -> Path:
        identity: dict[str, JsonValue] = {
            "weights": self.weights_digest,
            "data": dataset.key,
            "rows": hashlib.sha256(np.array(rows, dtype=np.int64).tobytes()).hexdigest(),
            "number": self.asked.number,
            "temperature": self.asked.temperature,
            "precision": self.precision,
        }
        return self.context.cache / "teacher" / f"{content_key(identity)}.npy"

    def _compute(self, engine: Engine, dataset: PackedDataset, rows: Sequence[int], path: Path) -> None:
        """Write what the teacher says, round by round: in each, every share of the processes has a micro-batch."""
        starts, number = _starts(dataset, rows), self.asked.number
        said = self._new_file(path, int(starts[-1])) if is_main_process() else None
        size = self.micro_batch_size * engine.data_parallel_size
        shares = list(even_micro_batches(len(rows), self.micro_batch_size, engine.data_rank, engine.data_parallel_size))
        for index, share in enumerate(shares):
            self.watchdog.begins(f"micro-batch {index + 1} of {len(shares)} of the teacher")
            batch = dataset.batch([rows[position] for position in share], self.micro_batch_size)
            answer = engine.likeliest_tokens(replace(batch, temperature=self.asked.temperature), number)
            first, last = starts[index * size], starts[min((index + 1) * size, len(rows))]
            of_round = torch.zeros(int(last - first), 2, number, dtype=torch.float64)
            if share:
                own = slice(int(starts[share[0]] - first), int(starts[share[-1] + 1] - first))
                of_round[own] = torch.stack([values[batch.has_target].double() for values in answer], 1)
            tokens, values = engine.sum_over_data(of_round).unbind(1)
            if said is not None:
                said["tokens"][first:last], said["log_probabilities"][first:last] = tokens, values
            self.context.progress(index + 1, len(shares), "micro-batches", "the teacher's likeliest tokens")
        if said is not None:
            said.flush()
            _unfinished(path).replace(path)
        gathered(0.0)  # the others read what the first process has written

    def _new_file(self, path: Path, num_targets: int) -> np.memmap:
        path.parent.mkdir(parents=True, exist_ok=True)
        number = (self.asked.number,)
        record = np.dtype([("tokens", np.int32, number), ("log_probabilities", np.float32, number)])
        check_free_disk(path.parent, num_targets * record.itemsize, "teacher's likeliest tokens (distill.loss_top_k)")
        return np.lib.format.open_memmap(_unfinished(path), mode="w+", dtype=record, shape=(num_targets,))


def ask_teacher(
    config: TrainConfig,
    context: StageContext,
    wanted: Sequence[RowsOf],
    start_digest: str,
    watchdog: Watchdog,
    build: BuildEngine,
) -> dict[PackedDataset, TeacherRows]:
    """What the teacher of a recipe's stage says of each dataset's rows; collective.

    start_digest: of the weights that training starts from. Raises ModelError or LayoutError for a teacher that the
    engine or the layout does not allow.
    """
    assert config.teacher and config.teacher_tokens
    folder = context.inputs[config.teacher] / "model"
    alone = config.model_copy(update={"adapter": None, "base": None})
    shape, digest = check_model(alone, context, folder), model_digest(folder)
    if digest == start_digest:
        context.warn(f"the teacher, {config.teacher}, is the model that training starts from: there is little to learn")
    teacher = TeacherModel(
        digest,
        vocabulary_size(read_config(folder)),
        config.teacher_tokens,
        config.precision,
        config.layout.micro_batch_size,
        context,
        watchdog,
        lambda: build(alone, folder, shape),
    )
    datasets = [dataset for dataset, _ in wanted]
    return dict(zip(datasets, teacher.rows(wanted), strict=True))


def _starts(dataset: PackedDataset, rows: Sequence[int]) -> NDArray[np.int64]:
    return np.concatenate([[0], dataset.num_row_targets(rows).cumsum()])


def _unfinished(path: Path) -> Path:
    return path.with_name(f".{path.name}.{os.getpid()}.npy")
