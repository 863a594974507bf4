"""Batch of one row of given documents, for checks of models."""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional

from stages.data.batch import IGNORED, Batch, Documents


def packed(documents: Sequence[Tensor]) -> Batch:
    """Pack documents of token ids into a batch of one row; all tokens but each document's first are targets."""
    # The target of a token is the next one; a document's last token has none.
    targets = torch.cat([functional.pad(document[1:], (0, 1), value=IGNORED) for document in documents])
    positions = torch.cat([torch.arange(len(document)) for document in documents])
    lengths = [len(document) for document in documents]
    numbers = torch.arange(len(documents)).repeat_interleave(torch.tensor(lengths))
    borders = Documents(numbers[None], len(lengths), lengths)
    return Batch.of(torch.cat(list(documents))[None], targets[None], positions[None], borders)
