"""Protocol of training engines: what the loop asks of FSDP2, Megatron-core or any other.

An engine owns the model, the optimizer and every collective over them. The loop owns data order, batches, loss,
schedule, logging and the places of checkpoints. All methods are collective: every process calls them in the same order.
"""

from __future__ import annotations

import gc
from collections.abc import Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import torch

from stages.core.errors import ModelError
from stages.data.batch import Batch
from stages.engines.loss import Loss
from stages.models.flops import ModelFlops


@dataclass(frozen=True)
class LossMeans:
    """Loss and its metrics, as means over a global batch."""

    loss: float
    metrics: dict[str, float]


@dataclass(frozen=True)
class StepOutcome(LossMeans):
    """Result of one optimizer step. `grad_norm` is global and taken before clipping."""

    grad_norm: float
    measured: dict[str, float] = field(default_factory=dict)
    """Metrics of a step that only the engine can measure."""


class Engine(Protocol):
    """A model in training, spread over processes."""

    data_rank: int
    """Number of the share of every global batch that this process gets; equal on processes that split one model."""
    data_parallel_size: int
    """Number of shares of a global batch."""
    num_devices: int
    """Number of processes, each with its device."""
    device: torch.device
    compute_dtype: torch.dtype
    flops: ModelFlops

    def train_step(
        self, micro_batches: Sequence[Batch], loss: Loss, learning_rate: float, max_grad_norm: float | None
    ) -> StepOutcome:
        """Make one optimizer step over the global batch of which `micro_batches` are this process's share.

        The gradient is that of the loss as a mean over the whole global batch. Nothing is updated when loss or gradient
        norm is not finite: the caller sees that in the outcome, and stops.
        """

    def evaluate(self, micro_batches: Iterable[Batch], loss: Loss) -> LossMeans:
        """Return loss and metrics without learning; every process passes equally many micro-batches."""

    def document_log_probabilities(self, batch: Batch) -> torch.Tensor:
        """Return log-probabilities of documents in nats, float32 [documents] on the CPU. Forward only."""

    def target_log_probabilities(self, batch: Batch) -> torch.Tensor:
        """Return targets' log-probabilities in nats, float32 [rows, sequence] on the CPU; 0 elsewhere. Forward only."""

    def predictions(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the targets' log-probabilities and the likeliest tokens, on the CPU. Forward only.

        float32 [rows, sequence] in nats, and int64 [rows, sequence]: the likeliest token at each target, negative
        elsewhere.
        """

    def likeliest_tokens(self, batch: Batch, number: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the likeliest tokens at each target with their log-probabilities, on the CPU. Forward only.

        int64 and float32 [rows, sequence, number] in descending order, in nats; 0 where there is no target.
        """

    def sum_over_data(self, values: torch.Tensor) -> torch.Tensor:
        """Return the sum of float64 values on the CPU over the shares of a global batch."""

    def broadcast_from_rank0(self, value: float) -> float:
        """Return rank 0's value on every process."""

    def save(self, folder: Path) -> Future[None]:
        """Start writing weights and optimizer state as of now; training may go on before the future is done."""

    def load(self, folder: Path) -> None:
        """Restore the checkpoint that `save` wrote, perhaps under another layout."""

    @property
    def checkpoint_bytes(self) -> int:
        """Size of a checkpoint, over all processes."""

    def export(self, folder: Path, dtype: torch.dtype) -> list[ModelError]:
        """Write the model as a Hugging Face folder, or the adapter in PEFT's format; see `stages.engines.export`.

        Returns, on rank 0, what is wrong with an adapter that was written nevertheless. Raises ModelError for a model
        that would lack trained weights; its checkpoint still has them.
        """

    def close(self) -> None:
        """Free the model, so that another engine may be built; the closed engine must not be used any more."""


def free_memory() -> None:
    """Collect garbage and return the allocator's unused memory to the device."""
    gc.collect()
    if torch.accelerator.is_available():
        torch.accelerator.empty_cache()
