"""Micro-batch of packed documents: inputs of the model's forward pass and of the loss, on any files and parallelism."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, TypeVar

import torch

from stages.models.media import ModelPart
from stages.models.pixels import normalized

IGNORED = -100
"""Target token id that marks a position without loss."""


@dataclass(frozen=True)
class Rollouts:
    """Sampled completions' advantages and, in nats (0 where no target is), log-probabilities, for policy gradients."""

    advantages: torch.Tensor
    """Advantage of each completion over those of the same prompt, float32 [num_documents]."""
    old_log_probabilities: torch.Tensor
    """Log-probabilities that the training engine gives with the weights used for sampling, float32 [rows, sequence]."""
    server_log_probabilities: torch.Tensor | None = None
    """Log-probabilities that the sampling server reported, float32 [rows, sequence]; NaN where it reported none."""
    reference_log_probabilities: torch.Tensor | None = None
    """Log-probabilities that the reference model gives, float32 [rows, sequence]; None if the loss needs none."""

    def without_documents(self) -> Rollouts:
        """Return a copy of the rollout data that describes no completion, for a batch that holds only padding."""
        return replace(self, advantages=self.advantages[:0])


@dataclass(frozen=True)
class Candidates:
    """Candidate tokens at each target position with the teacher's log-probabilities, for distillation."""

    tokens: torch.Tensor
    """Token ids of the candidates, int64 [rows, sequence, k], likeliest first; arbitrary where there is no loss."""
    log_probabilities: torch.Tensor
    """Teacher's log-probabilities of the k candidate tokens: float32 [rows, sequence, k], in nats."""
    is_whole_vocabulary: bool = False
    """True if the candidates are the whole vocabulary, instead of the teacher's k most likely tokens."""


@dataclass(frozen=True)
class Documents:
    """Boundaries of a batch's packed documents; a document is a text whose tokens attend only to each other.

    What is left at the end of a row are "documents" of padding, so that attention stays well-formed: they are numbered
    from `count` on, have no targets and no reference. Preference pairs lie in one row: 2k is chosen, 2k + 1 rejected.
    """

    ids: torch.Tensor
    """Index of the document to which each token belongs, int64 [rows, sequence]."""
    count: int
    lengths: Sequence[int]
    """Number of tokens of each document, in the order of the flattened rows; a row's padding counts as a document."""

    @property
    def token_rows(self) -> torch.Tensor:
        """Index of the batch row in which each token lies, int64 [rows, sequence]; -1 for padding."""
        rows = torch.arange(len(self.ids), device=self.ids.device)[:, None]  # [rows, 1], broadcast over the sequence
        return torch.where(self.ids < self.count, rows, -1)

    @property
    def rows(self) -> torch.Tensor:
        """Row of the batch in which each document lies, int64 [count]; padding is not counted."""
        rows = torch.arange(len(self.ids), device=self.ids.device)[:, None].expand_as(self.ids)
        found = torch.zeros(len(self.lengths), dtype=torch.int64, device=self.ids.device)
        # A document lies in one row, so each of its tokens writes the same number; [segments] -> [count].
        return found.index_copy(0, self.ids.flatten(), rows.flatten())[: self.count]

    def sums(self, values: torch.Tensor) -> torch.Tensor:
        """Return the differentiable sum of per-token values [rows, sequence] over each document: [count]."""
        # One sum for each segment; those of padding come last and are cut off.
        sums = torch.zeros(len(self.lengths), dtype=values.dtype, device=values.device)
        return sums.index_add(0, self.ids.flatten(), values.flatten())[: self.count]

    def of_tokens(self, values: torch.Tensor) -> torch.Tensor:
        """Return per-document values [count] repeated at each of their tokens: float [rows, sequence], 0 in padding."""
        padding = values.new_zeros(len(self.lengths) - self.count)
        return torch.cat([values, padding])[self.ids]  # [segments] -> [rows, sequence]


@dataclass(frozen=True)
class MediaInputs:
    """Media of a batch's documents, as the model's forward pass takes them; there may be none."""

    features: Mapping[str, torch.Tensor]
    """Arguments of the model, such as `pixel_values`, of all media in the order of their documents; see `arguments`."""
    token_types: torch.Tensor
    """Kind of each token, int64 [rows, sequence]: 1 if it stands for a picture, 2 for a video, 0 for text."""
    spatial_positions: torch.Tensor | None
    """Positions in time, height and width, int64 [3, rows, sequence]; None for models that count tokens alone."""
    runs: Sequence[tuple[int, int]]
    """First token, and token after the last, of each run of tokens that stand for media, in the flattened rows."""
    patches: Mapping[ModelPart, Sequence[int]] = field(default_factory=dict)
    """Number of patches of each picture, frame of a video and sound, by tower, by which their costs are counted."""
    pixel_statistics: Mapping[str, torch.Tensor] = field(default_factory=dict)
    """Mean and deviation, float32 [2, values], of the features whose pixels are bytes, uint8 [patches, values]."""

    @property
    def arguments(self) -> dict[str, torch.Tensor]:
        """Return the arguments of the model: the features, with pixels as its processor normalises them."""
        statistics = self.pixel_statistics.items()
        return {**self.features, **{name: normalized(self.features[name], one) for name, one in statistics}}


@dataclass(frozen=True)
class ModelInputs:
    """Inputs of the model's forward pass."""

    input_ids: torch.Tensor
    """Token ids, int64 [rows, sequence]."""
    position_ids: torch.Tensor
    """Position of each token in its document, counted from 0, int64 [rows, sequence]."""
    documents: Documents
    media: MediaInputs | None = None
    """Pictures, for a model that sees; None for text."""
    experts: torch.Tensor | None = None
    """Experts to which a mixture's layers send tokens, int32 [layers, tokens, k]; None: those that routers choose.

    Tokens are those that this process computes, in the order of the forward pass that recorded the choices."""


@dataclass(frozen=True)
class Signal:
    """Inputs of a loss, such as targets, labels and advantages; log-probabilities come from the model."""

    documents: Documents
    """Boundaries of the batch's packed documents; the same object as in `ModelInputs`."""
    targets: torch.Tensor
    """Target token at each position, int64 [rows, sequence]: the next token, or `IGNORED` where there is no loss."""
    target_weights: torch.Tensor | None = None
    """Weight of each target token in its document's log-probability, float32 [rows, sequence]; None: all 1."""
    reference_log_probabilities: torch.Tensor | None = None
    """Reference model's log-probability of each document's targets, summed, in nats, float32 [documents]."""
    is_good: torch.Tensor | None = None
    """Label of each answer in labelled data (KTO), bool [documents]: True for a good answer."""
    margins: torch.Tensor | None = None
    """Margin of each preference pair, float32 [pairs]: how much better the chosen answer is; None without margins."""
    mismatched: Batch | None = None
    """Batch of the same answers after other prompts, from which KTO estimates the KL divergence from the reference."""
    kl: float | None = None
    """Estimated KL divergence from the reference model, in nats, over the global batch."""
    rollouts: Rollouts | None = None
    """Advantages and log-probabilities of sampled completions, if the documents of this batch are such completions."""
    candidates: Candidates | None = None
    """Alternative tokens whose log-probabilities the loss needs besides those of the targets (for distillation)."""
    member: int = 0
    """Index of the mixture's dataset from which all rows of the batch come; 0 without a mixture."""
    temperature: float = 1.0
    """Temperature of sampling, by which logits are divided to match the sampled distribution."""

    own_positions: torch.Tensor | None = None
    """Indices of those with loss among the tokens of this process, int64 [targets], where others compute the rest."""

    @cached_property
    def target_positions(self) -> torch.Tensor:
        """Indices of the positions with loss in the flattened rows, int64 [targets].

        `Batch.to` finds them on the host, and takes them along: an accelerator would have to be waited for.
        """
        return target_positions(self.targets)

    @property
    def has_target(self) -> torch.Tensor:
        """Mask of the positions with loss, bool [rows, sequence]."""
        return self.targets != IGNORED

    @property
    def wanted(self) -> torch.Tensor:
        """Tokens whose log-probabilities the loss needs: the target and k candidates, int64 [rows, sequence, 1 + k]."""
        targets = self.targets.unsqueeze(-1)
        return targets if self.candidates is None else torch.cat([targets, self.candidates.tokens], -1)

    def log_probabilities(self, of_tokens: torch.Tensor) -> torch.Tensor:
        """Return each document's log-probability in nats, summed over its target tokens: float32 [documents]."""
        return self.documents.sums(of_tokens if self.target_weights is None else of_tokens * self.target_weights)


@dataclass(frozen=True)
class Batch:
    """Micro-batch of packed documents; preference data has two documents for each pair."""

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
        """Return a batch from ids, targets, positions and document boundaries. signal: further fields of `Signal`."""
        return cls(ModelInputs(input_ids, position_ids, documents), Signal(documents, targets, **signal))

    @property
    def documents(self) -> Documents:
        """Boundaries of the batch's packed documents, the same for the model's inputs and the loss."""
        return self.signal.documents

    def with_signal(self, **changes: Any) -> Batch:
        """Return a copy of the batch with changed inputs of the loss (fields of `Signal`)."""
        return replace(self, signal=replace(self.signal, **changes))

    def with_experts(self, experts: torch.Tensor) -> Batch:
        """Return a copy of the batch whose tokens go to these experts (`ModelInputs.experts`)."""
        return replace(self, inputs=replace(self.inputs, experts=experts))

    def with_reference(self, log_probabilities: torch.Tensor) -> Batch:
        """Return a copy of the batch with the reference model's log-probabilities, float32 [documents]."""
        if log_probabilities.shape != (self.documents.count,):
            raise ValueError(
                f"reference of shape {tuple(log_probabilities.shape)} for {self.documents.count} documents"
            )
        return self.with_signal(reference_log_probabilities=log_probabilities)

    def to(self, device: torch.device | str) -> Batch:
        """Return a copy of the batch on a device, with the positions of its targets (`Signal.target_positions`)."""
        return self._with_tensors(lambda tensor: tensor.to(device, non_blocking=True))

    def pinned(self) -> Batch:
        """Return a copy of the batch in page-locked host memory, for faster copies to the accelerator."""
        return self._with_tensors(torch.Tensor.pin_memory)

    def _with_tensors(self, change: Callable[[torch.Tensor], torch.Tensor]) -> Batch:
        _ = self.signal.target_positions  # found here, if not yet, and changed with the signal's fields
        documents = _with_tensors(self.documents, change)  # once for both groups
        inputs, signal = _with_tensors(self.inputs, change), _with_tensors(self.signal, change)
        return Batch(replace(inputs, documents=documents), replace(signal, documents=documents))


Part = TypeVar("Part", bound=Documents | ModelInputs | MediaInputs | Signal | Rollouts | Candidates)


def _with_tensors(part: Part, change: Callable[[torch.Tensor], torch.Tensor]) -> Part:
    """Return a copy of a batch's inputs or loss data with a function applied to all its tensors, cached ones too."""
    changed: dict[str, Any] = {
        name: change(value) if isinstance(value, torch.Tensor) else _with_tensors(value, change)
        for name, value in vars(part).items()
        if isinstance(value, torch.Tensor | Rollouts | Candidates | MediaInputs)
    }
    if isinstance(part, MediaInputs):
        for field_name in ("features", "pixel_statistics"):
            changed[field_name] = {name: change(value) for name, value in getattr(part, field_name).items()}
    cached = {name: changed.pop(name) for name in changed.keys() - part.__dataclass_fields__.keys()}
    copy = replace(part, **changed)
    vars(copy).update(cached)
    return copy


def target_positions(targets: torch.Tensor) -> torch.Tensor:
    """Return the indices of those that are not `IGNORED` in the flattened targets, int64 [targets]."""
    return (targets.flatten() != IGNORED).nonzero().squeeze(1)
