"""Rows of a packed dataset → micro-batches, with the reference's log-probabilities where the loss needs them."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import TypeVar

from stages.data.batch import Batch
from stages.data.dataset import PackedDataset
from stages.train.methods.method import BatchChange
from stages.train.reference import ReferenceRows

T = TypeVar("T")


@dataclass(frozen=True)
class BatchSource:
    """Micro-batches of always `micro_batch_size` rows; rows of padding stand in for missing ones."""

    dataset: PackedDataset
    micro_batch_size: int
    change: BatchChange | None = None
    reference: ReferenceRows | None = None
    mismatched: ReferenceRows | None = None
    """Of the answers to other prompts, where batches are to have them beside."""

    def batch(self, rows: Sequence[int]) -> Batch:
        """The rows as one micro-batch on the CPU."""
        batch = self.dataset.batch(rows, self.micro_batch_size)
        if self.change:
            batch = self.change(batch)
        documents = self.dataset.row_documents(rows)
        if self.mismatched:
            other = self.mismatched.attach(self.dataset.mismatched(rows, self.micro_batch_size), documents)
            batch = replace(batch, mismatched=other)
        return self.reference.attach(batch, documents) if self.reference else batch


def prefetched(load: Callable[[int], T], steps: range) -> Generator[T]:
    """`load(step)` for every step, made by a thread while the step before is being computed."""
    with ThreadPoolExecutor(1, thread_name_prefix="batches") as executor:
        ahead = [executor.submit(load, step) for step in steps[:1]]
        for step in steps:
            ready = ahead.pop().result()
            if step + 1 in steps:
                ahead.append(executor.submit(load, step + 1))
            yield ready
