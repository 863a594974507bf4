"""Micro-batch of packed documents, as one forward pass and a loss get it; independent of files and parallelism."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch

IGNORED = -100
"""Target id of a position without loss."""


@dataclass(frozen=True)
class Rollouts:
    """Advantages and log-probabilities of sampled completions; each completion is a document of the batch.

    All but the advantages are in nats, and 0 where no target is.
    """

    advantages: torch.Tensor
    """Advantages of completions, float32 [num_documents]: how much better each is than the others of its prompt."""
    old_log_probabilities: torch.Tensor
    """Log-probabilities by the training engine, float32 [rows, sequence], with the weights that were sampled from."""
    server_log_probabilities: torch.Tensor | None = None
    """Log-probabilities reported by the server that sampled, float32 [rows, sequence]; NaN where there are none."""
    reference_log_probabilities: torch.Tensor | None = None
    """Log-probabilities by the reference model, if the loss uses it: float32 [rows, sequence]."""

    def to(self, device: torch.device | str) -> Rollouts:
        """Return a copy of the batch's tensors on `device`."""
        return _moved(self, device)

    def without_documents(self) -> Rollouts:
        """Return a copy of the rollout data for a batch without documents."""
        return replace(self, advantages=self.advantages[:0])


@dataclass(frozen=True)
class Candidates:
    """Alternative tokens at each target, with the teacher's log-probabilities."""

    tokens: torch.Tensor
    """Candidate tokens, int64 [rows, sequence, k]: likeliest first by the teacher; arbitrary where no target is."""
    log_probabilities: torch.Tensor
    """Teacher's log-probabilities of the k candidate tokens: float32 [rows, sequence, k], in nats."""
    is_whole_vocabulary: bool = False
    """True if the candidates are the whole vocabulary."""

    def to(self, device: torch.device | str) -> Candidates:
        """Return a copy of the batch's tensors on `device`."""
        return _moved(self, device)


@dataclass(frozen=True)
class Batch:
    """Packed documents. A document is a text that attends to itself only; preference data has two a pair.

    `num_documents` counts real documents. What is left at the end of a row is one more "document" of padding, so that
    attention stays well-formed: those are numbered from `num_documents` on, have no targets and no reference.

    Documents of preference data come in pairs in the same row: 2k is chosen, 2k + 1 rejected.
    """

    input_ids: torch.Tensor
    """Token ids, int64 [rows, sequence]."""
    targets: torch.Tensor
    """Targets, int64 [rows, sequence]: next token, or `IGNORED`: without loss, a document's last token, padding."""
    position_ids: torch.Tensor
    """Positions of tokens, int64 [rows, sequence]: counted from 0 in every document."""
    document_ids: torch.Tensor
    """Number of the document that each token belongs to, int64 [rows, sequence]."""
    num_documents: int
    document_lengths: Sequence[int]
    """Token counts of all documents, padding included, in the order of the flattened rows; they add up to its size."""
    reference_log_probabilities: torch.Tensor | None = None
    """float32 [num_documents]: the reference model's log-probability of each document's targets, in nats."""
    target_weights: torch.Tensor | None = None
    """Weight of each target in its document's log-probability, float32 [rows, sequence]; default: 1 each."""
    is_good: torch.Tensor | None = None
    """Labels of labelled answers, bool [num_documents]: True for a good one."""
    margins: torch.Tensor | None = None
    """Margins of preference pairs, float32 [pairs]: how much better the chosen answer is, where rows say it."""
    mismatched: Batch | None = None
    """Batch of the same answers after other prompts, with their reference; used to estimate the KL divergence from it.
    """
    kl: float | None = None
    """Estimated KL divergence from the reference over the global batch, in nats."""
    rollouts: Rollouts | None = None
    """Data of sampled completions, which are documents of this batch."""
    candidates: Candidates | None = None
    """Alternative tokens whose log-probabilities the engine computes for the loss, beside those of the targets."""
    member: int = 0
    """Number of the mixture's dataset that all rows are from; 0 without a mixture."""
    temperature: float = 1.0
    """Divisor of the logits: log-probabilities are of the distribution that was sampled from."""

    @property
    def has_target(self) -> torch.Tensor:
        """Positions with loss, bool [rows, sequence]."""
        return self.targets != IGNORED

    @property
    def wanted(self) -> torch.Tensor:
        """Tokens whose log-probabilities are computed, int64 [rows, sequence, 1 + k]: targets, then candidates."""
        targets = self.targets.unsqueeze(-1)
        return targets if self.candidates is None else torch.cat([targets, self.candidates.tokens], -1)

    @property
    def token_rows(self) -> torch.Tensor:
        """Row number of each token of a real document, int64 [rows, sequence]; -1 in padding."""
        rows = torch.arange(len(self.input_ids), device=self.document_ids.device)[:, None]
        return torch.where(self.document_ids < self.num_documents, rows, -1)

    def document_sums(self, values: torch.Tensor) -> torch.Tensor:
        """Return sums of a float tensor [rows, sequence] over each real document: [num_documents], differentiable."""
        # One sum for each segment; those of padding come last and are cut off.
        sums = torch.zeros(len(self.document_lengths), dtype=values.dtype, device=values.device)
        return sums.index_add(0, self.document_ids.flatten(), values.flatten())[: self.num_documents]

    def of_tokens(self, values: torch.Tensor) -> torch.Tensor:
        """Spread a value per document [num_documents] over its tokens; 0 in padding: float [rows, sequence]."""
        padding = values.new_zeros(len(self.document_lengths) - self.num_documents)
        return torch.cat([values, padding])[self.document_ids]

    def log_probabilities(self, of_tokens: torch.Tensor) -> torch.Tensor:
        """Return documents' log-probabilities (nats), float32 [num_documents], from their targets' [rows, sequence]."""
        return self.document_sums(of_tokens if self.target_weights is None else of_tokens * self.target_weights)

    @property
    def document_rows(self) -> torch.Tensor:
        """Row number of each real document, int64 [num_documents]."""
        rows = torch.arange(len(self.input_ids), device=self.document_ids.device)[:, None].expand_as(self.document_ids)
        found = torch.zeros(len(self.document_lengths), dtype=torch.int64, device=self.document_ids.device)
        return found.index_copy(0, self.document_ids.flatten(), rows.flatten())[: self.num_documents]

    def with_reference(self, log_probabilities: torch.Tensor) -> Batch:
        """Return a copy of the batch with `reference_log_probabilities`, float32 [num_documents]."""
        if log_probabilities.shape != (self.num_documents,):
            raise ValueError(f"reference of shape {tuple(log_probabilities.shape)} for {self.num_documents} documents")
        return replace(self, reference_log_probabilities=log_probabilities)

    def to(self, device: torch.device | str) -> Batch:
        """Return a copy of the batch's tensors on `device`."""
        return _moved(self, device)


Movable = TypeVar("Movable", Batch, Rollouts, Candidates)


def _moved(movable: Movable, device: torch.device | str) -> Movable:
    moved: dict[str, Any] = {
        name: value.to(device, non_blocking=True) if isinstance(value, torch.Tensor) else value.to(device)
        for name, value in vars(movable).items()
        if isinstance(value, torch.Tensor | Rollouts | Candidates)
    }
    return replace(movable, **moved)
