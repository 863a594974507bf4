"""Changes of a batch of pairs: weights of targets, and prompts as targets."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from stages.data.batch import Batch


@dataclass(frozen=True)
class TailWeights:
    """Weight `alpha` of the targets by which an answer is longer than its pair's other: Liu et al. 2024 (LD-DPO)."""

    alpha: float

    def __call__(self, batch: Batch) -> Batch:
        """Return the batch of pairs with `target_weights`."""
        places = _places_of_targets(batch)
        lengths = batch.document_sums(batch.has_target.long())
        shared = torch.minimum(lengths[0::2], lengths[1::2]).repeat_interleave(2)
        of_documents = torch.cat([shared, shared.new_zeros(len(batch.document_lengths) - len(shared))])
        in_tail = places > of_documents[batch.document_ids]
        return replace(batch, target_weights=torch.where(in_tail, self.alpha, 1.0))


def _places_of_targets(batch: Batch) -> torch.Tensor:
    """Return the number of each target within its document, counted from 1: int64 [rows, sequence]."""
    running = batch.has_target.flatten().cumsum(0)
    starts = (batch.position_ids == 0).flatten()
    before = (running - batch.has_target.flatten().long())[starts]
    numbers = starts.cumsum(0) - 1
    return (running - before[numbers]).view_as(batch.targets)


@dataclass(frozen=True)
class ChosenPrompts:
    """Targets at all tokens of preferred documents; the prompt weighs nothing in answers' log-probabilities."""

    def __call__(self, batch: Batch) -> Batch:
        """Return the batch of pairs with targets at prompts too, and `target_weights`."""
        following = batch.input_ids.roll(-1, 1)
        has_next = (batch.document_ids == batch.document_ids.roll(-1, 1)) & (batch.position_ids.roll(-1, 1) > 0)
        is_chosen = (batch.document_ids < batch.num_documents) & (batch.document_ids % 2 == 0)
        targets = torch.where(is_chosen & has_next, following, batch.targets)
        return replace(batch, targets=targets, target_weights=batch.has_target.float())
