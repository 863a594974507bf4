"""Where a run's micro-batches come from: `Batches` is what the loop asks for; here, the rows of a packed dataset, with
what the reference or a teacher gives where the loss needs it.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import ClassVar, Protocol, TypeVar

import torch

from stages.core.errors import DataError
from stages.data.batch import Batch
from stages.data.config import DataConfig
from stages.data.dataset import PackedDataset
from stages.data.summaries import Lengths, ToolPrompt
from stages.engines.engine import Engine
from stages.kinds.train.methods.method import BatchChange
from stages.kinds.train.order import DataOrder, seen
from stages.kinds.train.reference import ReferenceRows
from stages.kinds.train.teacher import BuildEngine, TeacherRows
from stages.kinds.train.watchdog import Watchdog

T = TypeVar("T")
MOST_BATCHES, BATCH_TARGETS = 16, 1024
"""Of what is looked at before training: little, and enough for directions in which inputs vary."""


class TrainingData(Protocol):
    """What a run learns from. counts: metrics. conversations: whether chats, by a template. steps_of_epochs: optimizer
    steps of the epochs that the recipe wants. tool_prompts: one of each dataset with tools. lengths: of its documents;
    None where the model itself makes them."""

    @property
    def longest_document(self) -> int: ...
    @property
    def conversations(self) -> bool: ...
    @property
    def tool_prompts(self) -> Sequence[ToolPrompt]: ...
    @property
    def counts(self) -> dict[str, float]: ...
    @property
    def steps_of_epochs(self) -> int: ...
    @property
    def lengths(self) -> Lengths | None: ...

    def taught(self, build: BuildEngine, watchdog: Watchdog, stays: ExitStack) -> TrainingData:
        """With what a teacher says of it, if the method has one, that is loaded before the model that learns; stays:
        what ends one that is asked on. Collective."""

    def batches(self, engine: Engine, last_step: int, watchdog: Watchdog) -> Batches:
        """For the steps up to `last_step`, with the engine as it is before training. Collective; to be closed."""


class Batches(Protocol):
    """This process's share of every global batch. made_ahead: while the step before is being computed, by a thread.
    steps_together: a resumed run begins at a multiple of so many steps.
    files: in the work folder, for people to read.
    """

    @property
    def made_ahead(self) -> bool: ...
    @property
    def steps_together(self) -> int: ...
    @property
    def held_out(self) -> BatchSource | None: ...

    @property
    def files(self) -> Sequence[str]: ...

    def micro_batches(self, step: int) -> list[Batch]:
        """On the CPU; equally many for every process. Collective, unless they are made ahead."""

    def metrics(self, step: int, update_s: float) -> dict[str, float]:
        """What making them has shown; update_s: seconds that the optimizer step took."""

    def recorded(self) -> tuple[Batch, torch.Tensor | None]:
        """A few documents, to be kept with what the trained model gives them, the same on every process; and float32
        [targets], log-probabilities that the untrained one gave to their targets, if that is known."""

    def close(self) -> None:
        """End what makes them."""


@dataclass(frozen=True)
class BatchSource:
    """Micro-batches of always `micro_batch_size` rows; rows of padding stand in for missing ones."""

    dataset: PackedDataset
    micro_batch_size: int
    change: BatchChange | None = None
    reference: ReferenceRows | None = None
    mismatched: ReferenceRows | None = None
    """Of the answers to other prompts, where batches are to have them beside."""
    teacher: TeacherRows | None = None

    def batch(self, rows: Sequence[int]) -> Batch:
        """The rows as one micro-batch on the CPU."""
        batch = self.dataset.batch(rows, self.micro_batch_size)
        if self.change:
            batch = self.change(batch)
        if self.teacher:
            batch = self.teacher.attach(batch, rows)
        documents = self.dataset.row_documents(rows)
        if self.mismatched:
            other = self.mismatched.attach(self.dataset.mismatched(rows, self.micro_batch_size), documents)
            batch = replace(batch, mismatched=other)
        return self.reference.attach(batch, documents) if self.reference else batch


@dataclass(frozen=True)
class RowBatches:
    """Rows in an order that is a function of the seed and the step."""

    made_ahead: ClassVar[bool] = True
    steps_together: ClassVar[int] = 1
    files: ClassVar[Sequence[str]] = ()

    order: DataOrder
    training: BatchSource
    held_out: BatchSource | None
    data: DataConfig
    untrained: torch.Tensor | None = None
    """float32 [targets]: log-probabilities of the targets of `recorded` before training."""

    def micro_batches(self, step: int) -> list[Batch]:
        return [self.training.batch(rows) for rows in self.order.micro_batches(step)]

    def metrics(self, step: int, update_s: float) -> dict[str, float]:
        order = self.order
        return seen(self.data, self.training.dataset, order.slots, step * order.global_batch_size)

    def recorded(self) -> tuple[Batch, torch.Tensor | None]:
        source = self.held_out or self.training
        return source.dataset.batch([0], source.micro_batch_size), self.untrained

    def close(self) -> None:
        pass


def first_batches(dataset: PackedDataset, rows: Iterable[int], least_targets: int) -> list[Batch]:
    """Of these rows, in their order, micro-batches of BATCH_TARGETS targets or more; MOST_BATCHES at most.

    Raises DataError when all rows together have less than `least_targets`.
    """
    batches: list[Batch] = []
    together: list[int] = []
    num_targets = 0
    for row in rows:
        together.append(row)
        num_targets += int(dataset.batch([row]).has_target.sum())
        if num_targets >= max(least_targets, BATCH_TARGETS):
            batches.append(dataset.batch(together))
            together, num_targets = [], 0
        if len(batches) == MOST_BATCHES:
            return batches
    if not batches and num_targets >= least_targets:
        return [dataset.batch(together)]
    if not batches:
        raise DataError(
            f"adapter.init is eva, which needs {least_targets} learned tokens, one a direction, and the training rows "
            f"have {num_targets}; lower adapter.rank or eva_rho, or say `init: default`"
        )
    return batches


def prefetched(load: Callable[[int], T], steps: range) -> Generator[T]:
    """`load(step)` for every step, made by a thread while the step before is being computed."""
    with ThreadPoolExecutor(1, thread_name_prefix="batches") as executor:
        ahead = [executor.submit(load, step) for step in steps[:1]]
        for step in steps:
            ready = ahead.pop().result()
            if step + 1 in steps:
                ahead.append(executor.submit(load, step + 1))
            yield ready
