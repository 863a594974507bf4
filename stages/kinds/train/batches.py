"""Sources of a training run's micro-batches: protocols that the training loop uses, and packed rows of a dataset."""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import ClassVar, Protocol, TypeVar

import torch
from torch import Tensor

from stages.core.errors import DataError
from stages.data.batch import Batch, Signal
from stages.data.config import DataConfig
from stages.data.dataset import PackedDataset
from stages.data.media_reference import MediaReference
from stages.data.summaries import Lengths
from stages.engines.engine import Engine, LossMeans
from stages.engines.loss import Counts, Loss, Parts, Totals
from stages.engines.recorded import RecordedBatch
from stages.kinds.train.methods.method import BatchChange, Method
from stages.kinds.train.order import DataOrder, even_micro_batches, seen
from stages.kinds.train.reference import ReferenceRows
from stages.kinds.train.teacher import BuildEngine, TeacherRows
from stages.kinds.train.watchdog import Watchdog
from stages.models.recorded import ToolPrompt
from stages.planner.workload import RowMedia

T = TypeVar("T")
MOST_BATCHES, BATCH_TARGETS = 16, 1024
"""Largest number of micro-batches, and smallest number of target tokens in each, from which EVA initialises an adapter
before training: few, but enough to find the main directions of the layers' inputs."""


class TrainingData(Protocol):
    """Training data of a run (protocol): rows of datasets, or prompts that the model answers.

    longest_document: in tokens. has_media: documents have pictures. conversations: whether the documents are chats,
    rendered by a template. tool_prompts: examples of chats with tools or pictures. counts: metrics about the data.
    media: that the model learns from, each once. lengths: document lengths; None where the model itself writes the
    documents. pictures: of the rows; None for text.
    """

    @property
    def longest_document(self) -> int: ...
    @property
    def has_media(self) -> bool: ...
    @property
    def conversations(self) -> bool: ...
    @property
    def tool_prompts(self) -> Sequence[ToolPrompt]: ...
    @property
    def counts(self) -> dict[str, float]: ...
    @property
    def media(self) -> frozenset[MediaReference]: ...
    @property
    def steps_of_epochs(self) -> int: ...
    @property
    def lengths(self) -> Lengths | None: ...
    @property
    def row_media(self) -> tuple[RowMedia, ...]: ...

    def with_teacher(self, build: BuildEngine, watchdog: Watchdog, teacher_lifetime: ExitStack) -> TrainingData:
        """Return the training data with the teacher's token probabilities added, if the method has a teacher.

        Collective. The teacher is loaded before the model that learns. teacher_lifetime: closes one that is asked in
        training.
        """

    def batches(self, engine: Engine, last_step: int, watchdog: Watchdog) -> Batches:
        """Return the micro-batches of all steps up to `last_step`; the caller closes them. Collective.
        The engine holds the untrained model: reference log-probabilities are computed here.
        """


class HeldOut(Protocol):
    """Rows, or prompts, that a training holds out to measure how well it generalises (protocol)."""

    def evaluate(self, engine: Engine, loss: Loss, method: Method) -> LossMeans:
        """Return the mean loss, of which less is better, and metrics over all that is held out. Collective."""


class Batches(Protocol):
    """Source of this process's micro-batches: its share of every global batch.

    made_ahead: a thread makes a step's batches while the step before is computed. steps_together: a resumed run begins
    at a multiple of this number of steps. files: files in the work folder that are shown to people.
    """

    @property
    def made_ahead(self) -> bool: ...
    @property
    def steps_together(self) -> int: ...
    @property
    def held_out(self) -> HeldOut | None: ...
    @property
    def files(self) -> Sequence[str]: ...

    def micro_batches(self, step: int) -> list[Batch]:
        """Return one step's micro-batches, on the CPU, equally many on every process. Collective, unless made ahead."""

    def metrics(self, step: int, update_s: float) -> dict[str, float]:
        """Return metrics of a training step's data, such as dataset shares. update_s: seconds of the optimizer step."""

    def recorded(self) -> RecordedBatch:
        """Return a few documents whose log-probabilities later stages must reproduce, stored with the trained model."""

    def settle(self) -> None:
        """Finish what is made in advance, so that a run that resumes from a checkpoint of now finds it."""

    def close(self) -> None:
        """Release the resources that make the batches, such as a sampling server."""


@dataclass(frozen=True)
class BatchSource:
    """Maker of micro-batches from a dataset's rows; each micro-batch is padded to `micro_batch_size` rows."""

    dataset: PackedDataset
    micro_batch_size: int
    change: BatchChange | None = None
    reference: ReferenceRows | None = None
    mismatched: ReferenceRows | None = None
    """Reference's log-probabilities of answers paired with other prompts, from which KTO estimates its divergence."""
    teacher: TeacherRows | None = None

    def batch(self, rows: Sequence[int]) -> Batch:
        batch = self.dataset.batch(rows, self.micro_batch_size)
        if self.change:
            batch = self.change(batch)
        if self.teacher:
            batch = self.teacher.attach(batch, rows)
        documents = self.dataset.row_documents(rows)
        if self.mismatched:
            other = self.mismatched.attach(self.dataset.mismatched(rows, self.micro_batch_size), documents)
            batch = batch.with_signal(mismatched=other)
        return self.reference.attach(batch, documents) if self.reference else batch

    def evaluate(self, engine: Engine, loss: Loss, method: Method) -> LossMeans:
        """Return mean loss and metrics over all rows, and for each dataset of a mixture. Collective."""
        by_name = self.dataset.member_rows
        batches = [
            self.batch([rows[index] for index in share]).with_signal(member=member)
            # never rows of two datasets in one micro-batch: `LossByDataset` counts each under its `member`
            for member, rows in enumerate(by_name.values())
            for share in even_micro_batches(
                len(rows), self.micro_batch_size, engine.data_rank, engine.data_parallel_size
            )
        ]
        whole = LossByDataset(loss, tuple(by_name)) if len(by_name) > 1 else loss
        averages = engine.evaluate(with_divergence(engine, batches), whole)
        if not method.is_likelihood:
            return averages
        abouts = {"": self.dataset.about, **{f".{name}": one.about for name, one in self.dataset.members.items()}}
        bits = {
            f"bits_per_byte{name}": bits_per_byte(
                averages.metrics[f"loss{name}"] if name else averages.loss, about.bytes_per_token
            )
            for name, about in abouts.items()
            if about.bytes_per_token is not None
        }
        return replace(averages, metrics={**averages.metrics, **bits})


@dataclass(frozen=True)
class RowBatches:
    """Micro-batches of dataset rows, in an order that is a function of the seed and the step."""

    made_ahead: ClassVar[bool] = True
    steps_together: ClassVar[int] = 1
    files: ClassVar[Sequence[str]] = ()

    order: DataOrder
    training: BatchSource
    held_out: BatchSource | None
    data: DataConfig
    untrained: torch.Tensor | None = None
    """Untrained model's log-probabilities of the targets that are stored with the trained model, float32 [targets]."""

    def micro_batches(self, step: int) -> list[Batch]:
        return [self.training.batch(rows) for rows in self.order.micro_batches(step)]

    def metrics(self, step: int, update_s: float) -> dict[str, float]:
        order = self.order
        return seen(self.data, self.training.dataset, order.slots, step * order.global_batch_size)

    def recorded(self) -> RecordedBatch:
        source = self.held_out or self.training
        dataset = source.dataset
        pictures = dataset.pictures(0) if dataset.has_media else ()
        return RecordedBatch(dataset.batch([0], source.micro_batch_size), self.untrained, pictures)

    def settle(self) -> None:
        pass

    def close(self) -> None:
        pass


def first_batches(dataset: PackedDataset, rows: Iterable[int], least_targets: int) -> list[Batch]:
    """Group dataset rows into at most MOST_BATCHES micro-batches with at least BATCH_TARGETS targets each, for EVA.

    Raises DataError when all rows together have fewer than `least_targets`.
    """
    batches: list[Batch] = []
    together: list[int] = []
    num_targets = 0
    for row in rows:
        together.append(row)
        num_targets += int(dataset.batch([row]).signal.has_target.sum())
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
    """Yield `load(step)` for every step; a thread loads the next step's value while the caller uses the current one."""
    with ThreadPoolExecutor(1, thread_name_prefix="batches") as executor:
        ahead = [executor.submit(load, step) for step in steps[:1]]
        for step in steps:
            ready = [ahead.pop().result()]
            # submitted before the yield: the next step's batches are made while the caller computes this one
            if step + 1 in steps:
                ahead.append(executor.submit(load, step + 1))
            yield ready[0]
            executor.submit(ready.clear)  # the thread gives pictures' memory back, which takes a hundredth of a second


def bits_per_byte(nats_per_token: float, bytes_per_token: float) -> float:
    """Convert a loss to bits per byte, comparable between tokenizers (Gao et al. 2020, The Pile, section 3.1)."""
    return nats_per_token / bytes_per_token / math.log(2)


@dataclass(frozen=True)
class LossByDataset:
    """Wrapper of a loss that adds its value and metrics for each dataset of a mixture: `loss.NAME` and `METRIC.NAME`.

    A micro-batch holds rows of one dataset, whose number is its `member`.
    """

    loss: Loss
    names: Sequence[str]

    @property
    def metric_names(self) -> tuple[str, ...]:
        """Return the names of all metrics: the loss's over all rows, then those of each mixture dataset."""
        own = self.loss.metric_names
        return (*own, *(f"{metric}.{name}" for name in self.names for metric in ("loss", *own)))

    def counts(self, signal: Signal) -> Counts:
        """Return the counts that the loss's means divide by, such as of pairs, for all rows and for each dataset."""
        counts = self.loss.counts(signal)
        by_dataset = {
            f"{what}.{number}": count if number == signal.member else 0
            for number in range(len(self.names))
            for what, count in counts.items()
        }
        return {**counts, **by_dataset}

    def __call__(self, token_log_probabilities: Tensor, signal: Signal, totals: Totals) -> Parts:
        """Return the micro-batch's contributions to the mean losses, over all rows and over its own dataset's rows."""
        loss, metrics = self.loss(token_log_probabilities, signal, totals)
        own_totals = {what: totals[f"{what}.{signal.member}"] for what in self.loss.counts(signal)}
        # the same micro-batch again, divided by its dataset's count instead of that of all rows
        own = self.loss(token_log_probabilities, signal, own_totals)
        by_dataset = [
            value.detach() if number == signal.member else loss.new_zeros(())
            for number in range(len(self.names))
            for value in (own[0], *own[1].values())
        ]
        names = self.metric_names
        return loss, dict(zip(names, (*metrics.values(), *by_dataset), strict=True))


def with_divergence(engine: Engine, micro_batches: Sequence[Batch]) -> Sequence[Batch]:
    """Add KTO's estimate of the divergence from the reference model, `kl` in nats, to the micro-batches. Collective.

    It is the mean of log π/π_ref over answers to other prompts of the global batch (Ethayarajh et al. 2024, section
    4.1), at least 0. It is one number for all shares, so their forward passes come before the step.
    """
    sums = torch.zeros(2, dtype=torch.float64)
    others = [batch.signal.mismatched for batch in micro_batches if batch.signal.mismatched]
    if not others:
        return micro_batches
    for other in others:
        assert other.signal.reference_log_probabilities is not None
        ratios = engine.document_log_probabilities(other) - other.signal.reference_log_probabilities
        # [2]: sum of log π/π_ref over the micro-batch's documents, and their number
        sums += torch.tensor([ratios.double().sum(), len(ratios)])
    total, num_documents = engine.sum_over_data(sums).tolist()
    return [batch.with_signal(kl=max(0.0, total / num_documents)) for batch in micro_batches]
