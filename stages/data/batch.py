"""What one forward pass sees: a micro-batch of packed documents. Knows nothing of files, losses or parallelism."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch

IGNORED = -100
"""The target of a position that carries no loss."""


@dataclass(frozen=True)
class Rollouts:
    """What is known of completions that the model gave: each is a document, with its tokens as targets.

    All but the advantages are in nats, and 0 where no target is.
    """

    advantages: torch.Tensor
    """float32 [num_documents]: by how much a completion is better than the others that answer its prompt."""
    old_log_probabilities: torch.Tensor
    """float32 [rows, sequence]: by the engine that trains, with the weights that the completions were sampled from."""
    server_log_probabilities: torch.Tensor | None = None
    """float32 [rows, sequence]: what the server said of them; NaN where it said nothing."""
    reference_log_probabilities: torch.Tensor | None = None
    """float32 [rows, sequence]: by the reference model, if the loss measures how far it is from that."""

    def to(self, device: torch.device | str) -> Rollouts:
        """The same on `device`."""
        return _moved(self, device)

    def without_documents(self) -> Rollouts:
        """Of a batch of which no document is left."""
        return replace(self, advantages=self.advantages[:0])


@dataclass(frozen=True)
class Candidates:
    """Tokens that might stand in the place of each target, and what a teacher gives to them."""

    tokens: torch.Tensor
    """int64 [rows, sequence, k], from the one that the teacher holds likeliest on; anything where no target is."""
    log_probabilities: torch.Tensor
    """float32 [rows, sequence, k], in nats."""
    is_whole_vocabulary: bool = False
    """Whether there are no other tokens."""

    def to(self, device: torch.device | str) -> Candidates:
        """The same on `device`."""
        return _moved(self, device)


@dataclass(frozen=True)
class Batch:
    """Packed documents. A document is a text that attends to itself only; preference data has two a pair.

    `num_documents` counts real documents. What is left at the end of a row is one more "document" of padding, so that
    attention stays well-formed: those are numbered from `num_documents` on, have no targets and no reference.

    Documents of preference data come in pairs in the same row: 2k is chosen, 2k + 1 rejected.
    """

    input_ids: torch.Tensor
    """int64 [rows, sequence]"""
    targets: torch.Tensor
    """int64 [rows, sequence]: the next token, or `IGNORED`: without loss, at a document's last token, in padding."""
    position_ids: torch.Tensor
    """int64 [rows, sequence]: counts from 0 in every document."""
    document_ids: torch.Tensor
    """int64 [rows, sequence]"""
    num_documents: int
    document_lengths: Sequence[int]
    """Tokens of every document, padding included, in the order of the flattened rows; adds up to rows × sequence."""
    reference_log_probabilities: torch.Tensor | None = None
    """float32 [num_documents]: what the reference model gives to the targets of each document, in nats."""
    target_weights: torch.Tensor | None = None
    """float32 [rows, sequence]: how much each target counts in its document's log-probability; default: 1 each."""
    is_good: torch.Tensor | None = None
    """bool [num_documents]: the label of a labelled answer."""
    margins: torch.Tensor | None = None
    """float32 [pairs]: by how much the chosen answer of each is better, where rows say it."""
    mismatched: Batch | None = None
    """The same answers after other prompts, with their reference: they estimate the divergence from it."""
    kl: float | None = None
    """That divergence over the global batch, in nats."""
    rollouts: Rollouts | None = None
    """Of completions that the model gave, documents of this batch."""
    candidates: Candidates | None = None
    """Whose log-probabilities engines give to a loss beside those of the targets."""
    member: int = 0
    """Of a mixture, the number of the dataset that the rows are of, where they are of one."""
    temperature: float = 1.0
    """What logits are divided by: log-probabilities are of what was sampled from."""

    @property
    def has_target(self) -> torch.Tensor:
        """bool [rows, sequence]: where there is loss."""
        return self.targets != IGNORED

    @property
    def wanted(self) -> torch.Tensor:
        """int64 [rows, sequence, 1 + k]: each target, and the k candidates in its place, if there are any."""
        targets = self.targets.unsqueeze(-1)
        return targets if self.candidates is None else torch.cat([targets, self.candidates.tokens], -1)

    @property
    def token_rows(self) -> torch.Tensor:
        """int64 [rows, sequence]: the row of each token of a real document, -1 in padding."""
        rows = torch.arange(len(self.input_ids), device=self.document_ids.device)[:, None]
        return torch.where(self.document_ids < self.num_documents, rows, -1)

    def document_sums(self, values: torch.Tensor) -> torch.Tensor:
        """Sums of float [rows, sequence] over each real document: float [num_documents], differentiable."""
        sums = torch.zeros(len(self.document_lengths), dtype=values.dtype, device=values.device)
        return sums.index_add(0, self.document_ids.flatten(), values.flatten())[: self.num_documents]

    def of_tokens(self, values: torch.Tensor) -> torch.Tensor:
        """Each document's value at all its tokens, 0 in padding: float [rows, sequence] of [num_documents]."""
        padding = values.new_zeros(len(self.document_lengths) - self.num_documents)
        return torch.cat([values, padding])[self.document_ids]

    def log_probabilities(self, of_tokens: torch.Tensor) -> torch.Tensor:
        """Of documents, in nats, of those of the targets: float32 [num_documents] of [rows, sequence]."""
        return self.document_sums(of_tokens if self.target_weights is None else of_tokens * self.target_weights)

    @property
    def document_rows(self) -> torch.Tensor:
        """int64 [num_documents]: the row that each real document lies in."""
        rows = torch.arange(len(self.input_ids), device=self.document_ids.device)[:, None].expand_as(self.document_ids)
        found = torch.zeros(len(self.document_lengths), dtype=torch.int64, device=self.document_ids.device)
        return found.index_copy(0, self.document_ids.flatten(), rows.flatten())[: self.num_documents]

    def with_reference(self, log_probabilities: torch.Tensor) -> Batch:
        """The same batch with `reference_log_probabilities`, float32 [num_documents]."""
        if log_probabilities.shape != (self.num_documents,):
            raise ValueError(f"reference of shape {tuple(log_probabilities.shape)} for {self.num_documents} documents")
        return replace(self, reference_log_probabilities=log_probabilities)

    def to(self, device: torch.device | str) -> Batch:
        """The same batch on `device`."""
        return _moved(self, device)


Movable = TypeVar("Movable", Batch, Rollouts, Candidates)


def _moved(one: Movable, device: torch.device | str) -> Movable:
    moved: dict[str, Any] = {
        name: value.to(device, non_blocking=True) if isinstance(value, torch.Tensor) else value.to(device)
        for name, value in vars(one).items()
        if isinstance(value, torch.Tensor | Rollouts | Candidates)
    }
    return replace(one, **moved)
