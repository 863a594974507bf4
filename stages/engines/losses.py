"""Losses over log-probabilities of target tokens, as sums: what any engine can produce and any layout can add up.

A loss maps the log-probabilities of a micro-batch's targets to (sum of the loss, sums of the metrics). Both are to be
divided by the loss's count over the whole global batch, which is known before the forward pass; so the number of
processes and of micro-batches does not change what is learned.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Protocol

import torch
from torch import Tensor
from torch.nn import functional

from stages.data.batch import IGNORED, Batch
from stages.train.config import DpoConfig, TrainConfig

Sums = tuple[Tensor, dict[str, Tensor]]


class Loss(Protocol):
    """What is minimised."""

    needs_reference: bool
    """Whether batches must carry `reference_log_probabilities`."""
    metric_names: ClassVar[tuple[str, ...]]
    """Of the sums beside the loss, in their order: a process without the loss must know how many there are."""

    def count(self, batch: Batch) -> int:
        """How many things the loss of this micro-batch sums over."""

    def __call__(self, token_log_probabilities: Tensor, batch: Batch) -> Sums:
        """Sums over the micro-batch; `token_log_probabilities` is float32 [rows, sequence], 0 where no target is."""


@dataclass(frozen=True)
class SftLoss:
    """Cross-entropy in nats, over target tokens."""

    needs_reference = False
    metric_names: ClassVar[tuple[str, ...]] = ()

    def count(self, batch: Batch) -> int:
        """Target tokens."""
        return int((batch.targets != IGNORED).sum())

    def __call__(self, token_log_probabilities: Tensor, batch: Batch) -> Sums:
        """Negative log-likelihood; no metrics beside."""
        return -token_log_probabilities.sum(), {}


@dataclass(frozen=True)
class DpoLoss:
    """Direct preference optimization, over pairs; documents 2k are chosen, 2k + 1 rejected.

    With h = (log π/π_ref of the chosen) - (log π/π_ref of the rejected):

        sigmoid  -(1 - ε) log σ(β h) - ε log σ(-β h)      Rafailov et al. 2023, equation 7; ε is `label_smoothing`
        ipo      (h - 1 / 2β)²                            Azar et al. 2023, equation 17, h from means over tokens, as
                                                          its authors and TRL do, so that long answers weigh no more
        hinge    max(0, 1 - β h)                          Zhao et al. 2023
    """

    config: DpoConfig
    needs_reference = True
    metric_names: ClassVar[tuple[str, ...]] = (
        "reward_chosen",
        "reward_rejected",
        "reward_margin",
        "preference_accuracy",
    )

    def count(self, batch: Batch) -> int:
        """Pairs."""
        return batch.num_documents // 2

    def __call__(self, token_log_probabilities: Tensor, batch: Batch) -> Sums:
        """Loss and metrics of all pairs; rewards are β log π/π_ref."""
        assert batch.reference_log_probabilities is not None
        log_ratios = document_sums(token_log_probabilities, batch) - batch.reference_log_probabilities
        rewards = self.config.beta * log_ratios.detach()
        margins = rewards[0::2] - rewards[1::2]
        if self.config.loss_type == "ipo":
            log_ratios = log_ratios / document_sums((batch.targets != IGNORED).float(), batch)
        metrics = {
            "reward_chosen": rewards[0::2].sum(),
            "reward_rejected": rewards[1::2].sum(),
            "reward_margin": margins.sum(),
            "preference_accuracy": (margins > 0).float().sum(),
        }
        return self._pair_losses(log_ratios[0::2] - log_ratios[1::2]).sum(), metrics

    def _pair_losses(self, margins: Tensor) -> Tensor:
        beta, smoothing = self.config.beta, self.config.label_smoothing
        if self.config.loss_type == "ipo":
            return (margins - 1 / (2 * beta)) ** 2
        if self.config.loss_type == "hinge":
            return functional.relu(1 - beta * margins)
        return -(1 - smoothing) * functional.logsigmoid(beta * margins) - smoothing * functional.logsigmoid(
            -beta * margins
        )


def build_loss(config: TrainConfig) -> Loss:
    """The loss that a recipe asks for."""
    return DpoLoss(config.dpo) if config.dpo else SftLoss()


def document_sums(values: Tensor, batch: Batch) -> Tensor:
    """Sums of float [rows, sequence] over each real document: float [num_documents]."""
    sums = torch.zeros(len(batch.document_lengths), dtype=values.dtype, device=values.device)
    return sums.index_add(0, batch.document_ids.flatten(), values.flatten())[: batch.num_documents]
