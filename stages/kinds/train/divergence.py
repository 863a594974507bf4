"""How far the model is from what it was before training: a mean over answers to prompts that are not theirs.

KTO weighs answers against it: Ethayarajh et al. 2024, section 4.1. It is one number for the global batch, whatever the
layout: the forward passes of all shares come first, then the step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from stages.data.batch import Batch
from stages.engines.engine import Engine


def with_divergence(engine: Engine, micro_batches: Sequence[Batch]) -> Sequence[Batch]:
    """This share's micro-batches of a global batch, with `kl` in nats where they have mismatched answers. Collective.

    It is at least 0, which the mean of log π/π_ref over other than the model's own answers need not be.
    """
    sums = torch.zeros(2, dtype=torch.float64)
    others = [batch.mismatched for batch in micro_batches if batch.mismatched]
    if not others:
        return micro_batches
    for other in others:
        assert other.reference_log_probabilities is not None
        ratios = engine.document_log_probabilities(other) - other.reference_log_probabilities
        sums += torch.tensor([ratios.double().sum(), len(ratios)])
    total, num_documents = engine.sum_over_data(sums).tolist()
    return [replace(batch, kl=max(0.0, total / num_documents)) for batch in micro_batches]
