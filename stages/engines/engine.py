"""The seam between the training loop and the parallelism: what the loop asks of FSDP2, Megatron-core or any other.

An engine owns the model, the optimizer and every collective over them. Data order, batches, loss, schedule, logging and
the whereabouts of checkpoints are the loop's. All methods are collective: every process calls them in the same order.
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
    """A loss and its metrics, means over a global batch."""

    loss: float
    metrics: dict[str, float]


@dataclass(frozen=True)
class StepOutcome(LossMeans):
    """What one optimizer step did. `grad_norm` is global and taken before clipping."""

    grad_norm: float
    measured: dict[str, float] = field(default_factory=dict)
    """Metrics that only the engine can measure."""


class Engine(Protocol):
    """A model that is being trained, spread over processes."""

    data_rank: int
    """Which share of every global batch this process is to be given; equal on processes that split one model."""
    data_parallel_size: int
    """In how many shares a global batch is cut."""
    num_devices: int
    """How many processes, each with its device, the run has."""
    device: torch.device
    compute_dtype: torch.dtype
    flops: ModelFlops

    def train_step(
        self, micro_batches: Sequence[Batch], loss: Loss, learning_rate: float, max_grad_norm: float | None
    ) -> StepOutcome:
        """One optimizer step over the global batch of which `micro_batches` are this process's share.

        The gradient is that of the loss as a mean over the whole global batch. Nothing is updated when loss or
        gradient norm is not finite: the caller sees that in the outcome, and stops.
        """

    def evaluate(self, micro_batches: Iterable[Batch], loss: Loss) -> LossMeans:
        """Loss and metrics without learning; every process gives equally many micro-batches, all get the result."""

    def document_log_probabilities(self, batch: Batch) -> torch.Tensor:
        """float32 [num_documents] on the CPU, in nats: see `Batch.log_probabilities`. Forward only."""

    def target_log_probabilities(self, batch: Batch) -> torch.Tensor:
        """float32 [rows, sequence] on the CPU, in nats, 0 where no target is. Forward only."""

    def predictions(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        """On the CPU, forward only: float32 [rows, sequence], the targets' log-probabilities in nats, and int64, the
        likeliest token in the place of each target, negative where there is none."""

    def likeliest_tokens(self, batch: Batch, number: int) -> tuple[torch.Tensor, torch.Tensor]:
        """On the CPU, forward only: int64 and float32 [rows, sequence, number], the likeliest tokens in the place of
        each target and their log-probabilities in nats, in descending order; 0 where no target is."""

    def sum_over_data(self, values: torch.Tensor) -> torch.Tensor:
        """Add up float64 values on the CPU over the shares of a global batch."""

    def broadcast_from_rank0(self, value: float) -> float:
        """What rank 0 gives, on every process."""

    def save(self, folder: Path) -> Future[None]:
        """Start writing weights and optimizer state as of now; training may go on before the future is done."""

    def load(self, folder: Path) -> None:
        """Restore what `save` wrote, perhaps under another layout."""

    @property
    def checkpoint_bytes(self) -> int:
        """Size of what `save` writes, over all processes."""

    def export(self, folder: Path, dtype: torch.dtype) -> list[ModelError]:
        """Write the model as a Hugging Face folder, or the adapter as PEFT has it; see `stages.engines.export`.

        Returns, on rank 0, what is wrong with an adapter that was written whole. Raises ModelError for a model that
        would lack what was trained: its checkpoint has that still."""

    def close(self) -> None:
        """Free what it holds of the model; nothing more may be asked of it, and another one may be made."""


def free_memory() -> None:
    """Give back what nothing refers to any more."""
    gc.collect()
    if torch.accelerator.is_available():
        torch.accelerator.empty_cache()
