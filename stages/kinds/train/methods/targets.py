"""Changes that methods make to batches of pairs: weights of target tokens (LD-DPO), and prompts as targets (ORPO)."""

from dataclasses import dataclass

import torch

from stages.data.batch import Batch


@dataclass(frozen=True)
class TailWeights:
    """Change for LD-DPO (Liu et al. 2024): tokens beyond the other answer's length get the weight `alpha`."""

    alpha: float

    def __call__(self, batch: Batch) -> Batch:
        places = _places_of_targets(batch)
        lengths = batch.documents.sums(batch.signal.has_target.long())
        shared = torch.minimum(lengths[0::2], lengths[1::2]).repeat_interleave(2)  # of a pair's two answers
        # [documents and paddings], to be indexed by `ids`, which number the padding of rows too
        of_documents = torch.cat([shared, shared.new_zeros(len(batch.documents.lengths) - len(shared))])
        in_tail = places > of_documents[batch.documents.ids]
        return batch.with_signal(target_weights=torch.where(in_tail, self.alpha, 1.0))


def _places_of_targets(batch: Batch) -> torch.Tensor:
    """Return each target's position among the targets of its document, counted from 1: int64 [rows, sequence]."""
    running = batch.signal.has_target.flatten().cumsum(0)  # [rows × sequence], over all documents
    starts = (batch.inputs.position_ids == 0).flatten()
    before = (running - batch.signal.has_target.flatten().long())[starts]
    numbers = starts.cumsum(0) - 1  # of each token's document, in the order of the rows: `before` is by document
    return (running - before[numbers]).view_as(batch.signal.targets)


@dataclass(frozen=True)
class ChosenPrompts:
    """Change for ORPO: preferred documents' tokens are all targets; prompts weigh 0 in answers' log-probabilities."""

    def __call__(self, batch: Batch) -> Batch:
        following = batch.inputs.input_ids.roll(-1, 1)
        ids = batch.documents.ids
        # `roll` brings a row's first token to its end: equal ids are not enough where a document fills the row,
        # and only the first token of a document has position 0.
        has_next = (ids == ids.roll(-1, 1)) & (batch.inputs.position_ids.roll(-1, 1) > 0)
        is_chosen = (ids < batch.documents.count) & (ids % 2 == 0)  # ids from `count` on are padding
        targets = torch.where(is_chosen & has_next, following, batch.signal.targets)
        return batch.with_signal(targets=targets, target_weights=batch.signal.has_target.float())
