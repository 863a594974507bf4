"""Micro-batch of packed documents, in two groups: what a model's forward takes, and what a loss takes.

Independent of files and parallelism.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
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


@dataclass(frozen=True)
class Documents:
    """Borders of a batch's packed documents. A document is a text that attends to itself only.

    `count` counts real documents. What is left at the end of a row is one more "document" of padding, so that attention
    stays well-formed: those are numbered from `count` on, have no targets and no reference.

    Documents of preference data come in pairs in the same row: 2k is chosen, 2k + 1 rejected.
    """

    ids: torch.Tensor
    """Number of the document that each token belongs to, int64 [rows, sequence]."""
    count: int
    lengths: Sequence[int]
    """Token counts of all documents, padding included, in the order of the flattened rows; they add up to its size."""

    @property
    def token_rows(self) -> torch.Tensor:
        """Row number of each token of a real document, int64 [rows, sequence]; -1 in padding."""
        rows = torch.arange(len(self.ids), device=self.ids.device)[:, None]
        return torch.where(self.ids < self.count, rows, -1)

    @property
    def rows(self) -> torch.Tensor:
        """Row number of each real document, int64 [count]."""
        rows = torch.arange(len(self.ids), device=self.ids.device)[:, None].expand_as(self.ids)
        found = torch.zeros(len(self.lengths), dtype=torch.int64, device=self.ids.device)
        return found.index_copy(0, self.ids.flatten(), rows.flatten())[: self.count]

    def sums(self, values: torch.Tensor) -> torch.Tensor:
        """Return sums of a float tensor [rows, sequence] over each real document: [count], differentiable."""
        # One sum for each segment; those of padding come last and are cut off.
        sums = torch.zeros(len(self.lengths), dtype=values.dtype, device=values.device)
        return sums.index_add(0, self.ids.flatten(), values.flatten())[: self.count]

    def of_tokens(self, values: torch.Tensor) -> torch.Tensor:
        """Spread a value per document [count] over its tokens; 0 in padding: float [rows, sequence]."""
        padding = values.new_zeros(len(self.lengths) - self.count)
        return torch.cat([values, padding])[self.ids]


@dataclass(frozen=True)
class ModelInputs:
    """Arguments of a model's forward."""

    input_ids: torch.Tensor
    """Token ids, int64 [rows, sequence]."""
    position_ids: torch.Tensor
    """Positions of tokens, int64 [rows, sequence]: counted from 0 in every document."""
    documents: Documents


@dataclass(frozen=True)
class Signal:
    """Arguments of a loss, beside the log-probabilities that the model gives to the targets."""

    documents: Documents
    """Borders of the documents: the same object as in the model's inputs."""
    targets: torch.Tensor
    """Targets, int64 [rows, sequence]: next token, or `IGNORED`: without loss, a document's last token, padding."""
    target_weights: torch.Tensor | None = None
    """Weight of each target in its document's log-probability, float32 [rows, sequence]; default: 1 each."""
    reference_log_probabilities: torch.Tensor | None = None
    """float32 [documents]: the reference model's log-probability of each document's targets, in nats."""
    is_good: torch.Tensor | None = None
    """Labels of labelled answers, bool [documents]: True for a good one."""
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

    def log_probabilities(self, of_tokens: torch.Tensor) -> torch.Tensor:
        """Return documents' log-probabilities (nats), float32 [documents], from their targets' [rows, sequence]."""
        return self.documents.sums(of_tokens if self.target_weights is None else of_tokens * self.target_weights)


@dataclass(frozen=True)
class Batch:
    """Packed documents: preference data has two documents a pair."""

    inputs: ModelInputs
    signal: Signal

    @classmethod
    def of(
        cls,
        input_ids: torch.Tensor,
        targets: torch.Tensor,
        position_ids: torch.Tensor,
        documents: Documents,
        **signal: Any,
    ) -> Batch:
        """Return the batch; `signal`: the other fields of `Signal`."""
        return cls(ModelInputs(input_ids, position_ids, documents), Signal(documents, targets, **signal))

    @property
    def documents(self) -> Documents:
        """Borders of the documents, which inputs and signal share."""
        return self.signal.documents

    def with_signal(self, **changes: Any) -> Batch:
        """Return a copy of the batch with other fields of the signal."""
        return replace(self, signal=replace(self.signal, **changes))

    def with_reference(self, log_probabilities: torch.Tensor) -> Batch:
        """Return a copy of the batch with `reference_log_probabilities`, float32 [documents]."""
        if log_probabilities.shape != (self.documents.count,):
            raise ValueError(
                f"reference of shape {tuple(log_probabilities.shape)} for {self.documents.count} documents"
            )
        return self.with_signal(reference_log_probabilities=log_probabilities)

    def to(self, device: torch.device | str) -> Batch:
        """Return a copy of the batch's tensors on `device`."""
        return self._with_tensors(lambda tensor: tensor.to(device, non_blocking=True))

    def pinned(self) -> Batch:
        """Return a copy in page-locked memory of the host, from which an accelerator copies while it computes."""
        return self._with_tensors(torch.Tensor.pin_memory)

    def _with_tensors(self, change: Callable[[torch.Tensor], torch.Tensor]) -> Batch:
        documents = _with_tensors(self.documents, change)  # once for both groups
        inputs, signal = _with_tensors(self.inputs, change), _with_tensors(self.signal, change)
        return Batch(replace(inputs, documents=documents), replace(signal, documents=documents))


Part = TypeVar("Part", bound=Documents | ModelInputs | Signal | Rollouts | Candidates)


def _with_tensors(part: Part, change: Callable[[torch.Tensor], torch.Tensor]) -> Part:
    """Return a copy of a part of a batch with its tensors changed; its documents and other batches stay."""
    changed: dict[str, Any] = {
        name: change(value) if isinstance(value, torch.Tensor) else _with_tensors(value, change)
        for name, value in vars(part).items()
        if isinstance(value, torch.Tensor | Rollouts | Candidates)
    }
    return replace(part, **changed)
