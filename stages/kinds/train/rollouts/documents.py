"""Completions → packed batches that a loss learns from, each process its share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from stages.data.batch import Batch, Rollouts
from stages.data.dataset import packed_batch
from stages.data.units import best_fit_decreasing
from stages.kinds.train.order import even_micro_batches


@dataclass(frozen=True)
class AnsweredPrompt:
    """A document: prompt and completion. log_probabilities: of the completion's tokens, by the server.

    is_learned: whether the completion's tokens are targets.
    """

    prompt: list[int]
    completion: list[int]
    log_probabilities: list[float]
    advantage: float
    is_learned: bool = True

    def __len__(self) -> int:
        return len(self.prompt) + len(self.completion)

    def cut(self, most_tokens: int) -> AnsweredPrompt:
        """Without what is beyond `most_tokens` of the completion."""
        room = max(1, most_tokens - len(self.prompt))
        return replace(self, completion=self.completion[:room], log_probabilities=self.log_probabilities[:room])


@dataclass(frozen=True)
class Packing:
    """How documents lie in rows, and rows in micro-batches. sequence_length: of rows, unless `packing` is off.

    most_tokens: that one document may have.
    """

    sequence_length: int
    most_tokens: int
    packing: bool
    micro_batch_size: int
    padding_token: int
    temperature: float = 1.0

    def share(self, documents: Sequence[AnsweredPrompt], data_rank: int, data_parallel_size: int) -> list[Batch]:
        """Micro-batches of one process, equally many for each; some may hold nothing but padding."""
        lengths = [len(one) for one in documents]
        rows = (
            best_fit_decreasing(lengths, self.sequence_length)
            if self.packing
            else [[number] for number in range(len(documents))]
        )
        shares = even_micro_batches(len(rows), self.micro_batch_size, data_rank, data_parallel_size)
        return [self.batch([[documents[number] for number in rows[row]] for row in share]) for share in shares]

    def batch(self, rows: Sequence[Sequence[AnsweredPrompt]]) -> Batch:
        """One micro-batch, whose `old_log_probabilities` are yet to be computed."""
        width = self.sequence_length if self.packing else max((len(one) for row in rows for one in row), default=2)
        batch = packed_batch(
            [_row(row) for row in rows], (self.micro_batch_size, width), padding_token=self.padding_token
        )
        server = torch.zeros(batch.targets.shape)
        for number, row in enumerate(rows):
            begin = 0
            for one in row:
                first = begin + len(one.prompt) - 1
                server[number, first : first + len(one.completion)] = torch.tensor(one.log_probabilities)
                begin += len(one)
        rollouts = Rollouts(
            advantages=torch.tensor([one.advantage for row in rows for one in row], dtype=torch.float32),
            old_log_probabilities=torch.zeros(batch.targets.shape),
            server_log_probabilities=server.where(batch.has_target, 0.0),
        )
        return replace(batch, rollouts=rollouts, temperature=self.temperature)


def _row(documents: Sequence[AnsweredPrompt]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    tokens = [np.array(one.prompt + one.completion, dtype=np.int32) for one in documents]
    learned = [
        np.array([False] * len(one.prompt) + [one.is_learned] * len(one.completion), dtype=np.bool_)
        for one in documents
    ]
    return np.concatenate(tokens), np.concatenate(learned), np.array([len(one) for one in documents])
