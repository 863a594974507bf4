"""Interface of training engines (FSDP2, Megatron-core or any other): the methods that the training loop calls.

An engine owns the model, the optimizer and every collective over them; the loop data order, batches, loss, schedule,
logging and the places of checkpoints. All methods are collective: every process calls them in the same order.
"""

import gc
from collections.abc import Iterable, Iterator, Mapping, Sequence
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
    """Mean loss and metrics over a global batch, as training and evaluation report them."""

    loss: float
    metrics: dict[str, float]


@dataclass(frozen=True)
class StepOutcome(LossMeans):
    """Result of one optimizer step: loss, metrics, and the global gradient norm before clipping."""

    grad_norm: float
    measured: dict[str, float] = field(default_factory=dict)
    """Metrics that only the engine can measure, such as the load-balancing loss of experts, by name."""


class Engine(Protocol):
    """Training engine: a model and its optimizer, spread over processes, with the methods that training loops call."""

    data_rank: int
    """Index of the share of each global batch that this process computes, equal where processes split one model."""
    token_rank: int
    """Index of the tokens of a global batch that this process computes, equal where processes split matrices."""
    data_parallel_size: int
    """Number of shares into which data parallelism splits a global batch."""
    num_devices: int
    """Number of processes, each of which has one device."""
    device: torch.device
    compute_dtype: torch.dtype
    flops: ModelFlops
    tags: Mapping[str, str]
    """Facts of the built engine for people, among the tags of a training: how documents are laid out, and why."""

    def train_step(
        self, micro_batches: Sequence[Batch], loss: Loss, learning_rate: float, max_grad_norm: float | None
    ) -> StepOutcome:
        """Make one optimizer step over a global batch, of which `micro_batches` are this process's share.

        The loss is a mean over the global batch. Nothing is updated when loss or gradient norm is not finite.
        """

    def evaluate(self, micro_batches: Iterable[Batch], loss: Loss) -> LossMeans:
        """Return loss and metrics without updating the model; every process passes equally many micro-batches."""

    def document_log_probabilities(self, batch: Batch) -> torch.Tensor:
        """Return each document's log-probability in nats, float32 [documents] on the CPU. Forward pass only."""

    def target_log_probabilities(self, batch: Batch) -> torch.Tensor:
        """Return target tokens' log-probabilities in nats, float32 [rows, sequence] on the CPU, 0 elsewhere."""

    def routed_log_probabilities(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        """Return `target_log_probabilities`, and the experts chosen meanwhile, int32 (`ModelInputs.experts`).

        Of an engine whose settings say `replays_experts`. Batches with these experts are computed with them.
        """

    def predictions(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the target tokens' log-probabilities and the likeliest token at each target.

        Without gradients, on the CPU: float32 [rows, sequence] in nats, and int64 [rows, sequence], negative where
        there is no target.
        """

    def likeliest_tokens(self, batch: Batch, number: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the `number` likeliest tokens at each target with their log-probabilities.

        Forward pass only, results on the CPU. Tokens are int64, log-probabilities float32 in nats, both [rows,
        sequence, number] in descending order; 0 where there is no target.
        """

    def sum_over_data(self, values: torch.Tensor) -> torch.Tensor:
        """Return the sum of a float64 CPU tensor over the data-parallel shares of a global batch, on every process."""

    def broadcast_from_rank0(self, value: float) -> float:
        """Return, on every process, the number that rank 0 passes, so that all processes act on one value."""

    def save(self, folder: Path) -> Future[None]:
        """Start writing a checkpoint; training may go on before the future is done."""

    def load(self, folder: Path) -> None:
        """Restore weights and optimizer state from a checkpoint by `save`, also one of another parallel layout."""

    @property
    def checkpoint_bytes(self) -> int:
        """Size of a checkpoint in bytes, over all processes."""

    def export(self, folder: Path, dtype: torch.dtype) -> list[ModelError]:
        """Write the trained model as a Hugging Face folder, or its adapter in PEFT's format.

        Returns, on rank 0, what is wrong with an adapter that was written nevertheless. Raises ModelError for a model
        that would lack trained weights; its checkpoint still has them.
        """

    def whole_weights(self, dtype: torch.dtype) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield what `export` of a model that is trained whole writes: each weight, on the CPU, by its name in files.

        Collective: every process takes all, one after the other; they are those of the model on rank 0 alone.
        """

    def close(self) -> None:
        """Free the model's memory, so that another engine may be built. The closed engine must not be used again."""


def free_memory() -> None:
    """Collect garbage and return the allocator's unused memory to the device."""
    gc.collect()
    if torch.accelerator.is_available():
        torch.accelerator.empty_cache()
