"""Rows of a dataset with what a teacher says of their targets, and the record that this has on disk."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from stages.data.batch import Batch, Candidates
from stages.data.dataset import PackedDataset
from stages.kinds.train.methods.method import TeacherTokens

ShareOf = Callable[[int], list[Batch]]
"""Data rank → micro-batches of its share; any process can say which those are."""


class OpenTeacher(Protocol):
    """A teacher that can be asked. What it says is `said_record`, of targets in their order."""

    def of_rows(self, dataset: PackedDataset, rows: Sequence[int]) -> Iterator[NDArray[np.void]]:
        """rows: sorted. All that it says of them, piece by piece, on rank 0; on the others anything. Collective."""

    def of_share(self, share_of: ShareOf, data_rank: int, num_shares: int) -> list[NDArray[np.void]]:
        """Of each micro-batch of this process's share. Collective."""


def said_record(number: int) -> np.dtype[np.void]:
    """Of a target: the teacher's likeliest tokens, int32 [number], and their log-probabilities, float32 [number]."""
    return np.dtype([("tokens", np.int32, (number,)), ("log_probabilities", np.float32, (number,))])


@dataclass(frozen=True)
class TeacherRows:
    """Rows of a dataset with what the teacher says of their targets."""

    rows: NDArray[np.int64]
    """int64 [rows], sorted: their numbers in the dataset"""
    starts: NDArray[np.int64]
    """int64 [rows + 1]: where the targets of each begin among `said`"""
    said: NDArray[np.void]
    """[targets] of `said_record`; mapped from disk"""
    asked: TeacherTokens
    is_whole_vocabulary: bool

    def attach(self, batch: Batch, rows: Sequence[int]) -> Batch:
        """The batch, made of these rows, with its candidates."""
        found = np.searchsorted(self.rows, rows)
        said = np.concatenate([self.said[:0], *(self.said[self.starts[one] : self.starts[one + 1]] for one in found)])
        return with_candidates(batch, said, self.asked, self.is_whole_vocabulary)


def with_candidates(batch: Batch, said: NDArray[np.void], asked: TeacherTokens, is_whole_vocabulary: bool) -> Batch:
    """said: `said_record` [targets of the batch, in order]."""
    shape = (*batch.targets.shape, asked.number)
    tokens, values = torch.zeros(shape, dtype=torch.int64), torch.zeros(shape)
    tokens[batch.has_target] = torch.from_numpy(said["tokens"].astype(np.int64))
    values[batch.has_target] = torch.from_numpy(np.ascontiguousarray(said["log_probabilities"]))
    candidates = Candidates(tokens, values, is_whole_vocabulary)
    return replace(batch, candidates=candidates, temperature=asked.temperature)
