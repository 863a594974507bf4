"""Training engine on Megatron-core: tensor, pipeline, context, expert and data parallelism, in any combination.

Master weights, gradients and Adam's moments are fp32; parameters and activations are of `compute_dtype`. The gradient
is a sum over shares and context-parallel ranks: a micro-batch gives its part of the mean over the whole global batch.
Call `prepare_megatron()` before anything of this module is used.
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from stages.adapters.check import loading_problem
from stages.adapters.files import write_adapter
from stages.core.contract import is_main_process
from stages.core.errors import ModelError
from stages.data.batch import Batch, Signal
from stages.engines.balance import METRIC, num_tokens
from stages.engines.engine import LossMeans, StepOutcome, free_memory
from stages.engines.log_probabilities import greedy_tokens, likeliest_tokens, token_log_probabilities
from stages.engines.loss import Loss, Totals, means, read, stacked, totals_of
from stages.engines.megatron.adapter import adapt, learned_factors, peft_adapter, seed_dropout
from stages.engines.megatron.balance import RouterBalance
from stages.engines.megatron.checkpoint import MegatronState
from stages.engines.megatron.clock import PipelineClock
from stages.engines.megatron.expert_choices import ExpertChoices
from stages.engines.megatron.model import build_model_chunks, compute_dtype, freeze_routers
from stages.engines.megatron.optimizer import Adam, wrap_chunks
from stages.engines.megatron.parallel import from_last_stage, represents_share, start_model_parallel
from stages.engines.megatron.pipeline import Consumer, OfHidden, Pipeline
from stages.engines.megatron.spec import check_precision
from stages.engines.megatron.weights import export_weights, load_weights, whole_weights
from stages.engines.settings import EngineSettings
from stages.models.facts import ModelFacts
from stages.models.loading import load_config
from stages.parallel.processes import collective_timeout


class MegatronEngine:
    """Training engine on Megatron-core; `stages.engines.engine.Engine` describes its methods."""

    def __init__(
        self,
        model: ModelFacts,
        settings: EngineSettings,
        device: torch.device,
        start: Path | None = None,
    ) -> None:
        """Load the model from its folder and split it over processes by `settings.layout`.

        The process group must exist, Megatron's groups not. start: folder of an adapter that training continues.
        """
        check_precision(settings.precision)
        layout = settings.layout
        folder, shape = model.folder, model.shape
        self._source, self._shape = model, shape
        timeout = collective_timeout(settings.hang_timeout_s)
        start_model_parallel(layout, is_mixture=shape.num_experts > 0, seed=settings.seed, timeout=timeout)
        self.device = device
        self.data_rank = parallel_state.get_data_parallel_rank()
        self.token_rank = parallel_state.get_data_parallel_rank(with_context_parallel=True)
        self.data_parallel_size = parallel_state.get_data_parallel_world_size()
        self.num_devices = dist.get_world_size()
        self.tags: Mapping[str, str] = {"documents": "packed"}
        self.compute_dtype = compute_dtype(settings.precision)
        self._adapter = peft_adapter(folder, settings.adapter, settings.seed, start) if settings.adapter else None
        self.flops = self._adapter.flops(shape.flops()) if self._adapter else shape.flops()
        has_adapter = self._adapter is not None
        balances_experts = settings.moe.aux_loss_coefficient > 0
        options = {"has_adapter": has_adapter, "balances_experts": balances_experts}
        self._chunks = build_model_chunks(shape, layout, settings.precision, device, **options)
        load_weights(
            self._chunks, folder, shape
        )  # before the adapter, whose layers the mapping of weights does not know
        if settings.moe.freeze_router:
            freeze_routers(self._chunks)
        if self._adapter:
            adapt(self._chunks, shape, self._adapter)
        self._balance = (
            RouterBalance(self._chunks, settings.moe.aux_loss_coefficient, shape.num_mixture_layers, device)
            if balances_experts
            else None
        )
        self._clock = PipelineClock(device) if layout.pp > 1 else None
        wrapped = wrap_chunks(self._chunks, layout)
        self._adam = Adam(wrapped, settings)
        self._state = MegatronState(self._chunks, shape, self._adam.megatron)
        rotary = LlamaRotaryEmbedding(load_config(folder)).to(device)
        self._pipeline = Pipeline(
            chunks=wrapped,
            layout=layout,
            rotary=rotary,
            vocab_size=shape.vocab_size,
            device=device,
            dtype=self.compute_dtype,
            clock=self._clock,
            choices=ExpertChoices(self._chunks) if settings.replays_experts else None,
        )

    def train_step(
        self, micro_batches: Sequence[Batch], loss: Loss, learning_rate: float, max_grad_norm: float | None
    ) -> StepOutcome:
        """Make one optimizer step; gradients are reduced during the backward pass of the last micro-batch."""
        totals = self._totals(micro_batches, loss)
        self._adam.zero_gradients()
        if self._adapter:
            seed_dropout(self._adapter)
        if self._balance:
            self._balance.begin_step(num_tokens(micro_batches, self._over_shares))

        # Empty but on the last pipeline stage, which alone has log-probabilities.
        parts = self._pipeline.run(micro_batches, _parts_of(loss, totals), backward=True)
        named = self._bubble() | ({METRIC: self._balance.of_step()} if self._balance else {})
        # The one time that a step waits for the device.
        (grad_norm,), summed, *values = read(self._adam.grad_norm(), self._summed(parts, loss), *named.values())
        mean, metrics = means(summed, loss)
        if math.isfinite(mean) and math.isfinite(grad_norm):
            self._adam.step(learning_rate, grad_norm, max_grad_norm)
        measured = {name: value for name, (value,) in zip(named, values, strict=True)}
        return StepOutcome(mean, metrics, grad_norm, measured)

    def evaluate(self, micro_batches: Iterable[Batch], loss: Loss) -> LossMeans:
        batches = list(micro_batches)
        consume = _parts_of(loss, self._totals(batches, loss))
        parts = self._pipeline.run(batches, consume, backward=False)
        return LossMeans(*means(self._summed(parts, loss).tolist(), loss))

    def document_log_probabilities(self, batch: Batch) -> Tensor:
        def per_document(log_probabilities: Tensor, signal: Signal) -> tuple[Tensor, Tensor]:
            return log_probabilities.sum(), signal.log_probabilities(log_probabilities)

        found = self._pipeline.run([batch], per_document, backward=False)
        # Earlier stages have no result: memory into which `from_last_stage` broadcasts it.
        sums = found[0] if found else torch.empty(batch.documents.count, device=self.device)
        return from_last_stage(sums.float()).cpu()

    def target_log_probabilities(self, batch: Batch) -> Tensor:
        return self._of_tokens(batch, token_log_probabilities, torch.float32)

    def routed_log_probabilities(self, batch: Batch) -> tuple[Tensor, Tensor]:
        assert self._pipeline.choices, "the settings say `replays_experts`"
        with self._pipeline.choices.recording() as recorded:
            return self.target_log_probabilities(batch), recorded().cpu()

    def predictions(self, batch: Batch) -> tuple[Tensor, Tensor]:
        return self.target_log_probabilities(batch), self._of_tokens(batch, greedy_tokens, torch.int64)

    def likeliest_tokens(self, batch: Batch, number: int) -> tuple[Tensor, Tensor]:
        tokens, values = self._of_tokens(
            batch, partial(likeliest_tokens, number=number), torch.float32, 2, number
        ).unbind(2)
        return tokens.long(), values

    def sum_over_data(self, values: Tensor) -> Tensor:
        """Sum values over data-parallel shares by one all-reduce, to which every share contributes once."""
        return self._over_shares(values).cpu()

    def broadcast_from_rank0(self, value: float) -> float:
        holder = torch.tensor(value, dtype=torch.float64, device=self.device)
        dist.broadcast(holder, src=0)
        return holder.item()

    def save(self, folder: Path) -> Future[None]:
        """Write a checkpoint by the Transformers model's weight names in the background, from a copy in host memory."""
        self._adam.settle()  # with overlap_param_gather, parameters are stale after a step
        return self._state.save(folder)

    def load(self, folder: Path) -> None:
        self._state.load(folder)  # masters and moments; `settle` gathers the parameters from them
        self._adam.settle()

    @property
    def checkpoint_bytes(self) -> int:
        """Size of a checkpoint in bytes: trainable weights and Adam's moments in fp32, weights in bf16."""
        half = 0 if self.compute_dtype == torch.float32 else 2
        learning = self._adapter.num_parameters if self._adapter else self._shape.num_parameters
        return (3 * 4 + half) * learning

    def export(self, folder: Path, dtype: torch.dtype) -> list[ModelError]:
        self._adam.settle()
        if self._adapter:
            factors = learned_factors(self._chunks, self._shape)
            if not is_main_process():
                return []
            problems = write_adapter(folder, factors, self._adapter.config, self._source.folder, dtype)
            unloadable = loading_problem(folder, self._source.folder, trust_remote_code=False)
            return [*problems, *([unloadable] if unloadable else [])]
        export_weights(self._chunks, source=self._source, folder=folder, dtype=dtype)
        return []

    def whole_weights(self, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
        self._adam.settle()
        return whole_weights(self._chunks, self._source, dtype)

    def close(self) -> None:
        del self._chunks, self._pipeline, self._adam, self._state, self._balance
        parallel_state.destroy_model_parallel()
        free_memory()

    def _of_tokens(self, batch: Batch, of_hidden: OfHidden, dtype: torch.dtype, *last: int) -> Tensor:
        """Run a batch forward; return values per token, [rows, sequence, …], on the CPU of every pipeline stage.

        last: further sizes. of_hidden: function that the last stage applies to hidden states. dtype: of the result.
        """

        def as_it_is(values: Tensor, _: Signal) -> tuple[Tensor, Tensor]:
            # Megatron wants a loss from every forward pass; with `backward=False` nothing is differentiated.
            return values.sum().float(), values

        found = self._pipeline.run([batch], as_it_is, backward=False, of_hidden=of_hidden)
        shape = (*batch.signal.targets.shape, *last)
        values = found[0].view(shape) if found else torch.empty(shape, dtype=dtype, device=self.device)
        return from_last_stage(values).cpu()

    def _bubble(self) -> dict[str, Tensor]:
        if self._clock is None:
            return {}
        times_s = torch.tensor(self._clock.take(), dtype=torch.float64, device=self.device)
        dist.all_reduce(times_s)  # over all stages: waiting ÷ passed time
        return {"pipeline_bubble_fraction": times_s[1] / times_s[0]}

    def _totals(self, micro_batches: Sequence[Batch], loss: Loss) -> Totals:
        return totals_of(loss, micro_batches, self._over_shares)

    def _summed(self, parts: list[Tensor], loss: Loss) -> Tensor:
        """Return the global batch's mean loss and metrics, float64. parts: this process's, [] but on the last stage."""
        size = 1 + len(loss.metric_names)
        total = torch.stack(parts).sum(0) if parts else torch.zeros(size, dtype=torch.float64, device=self.device)
        return self._over_shares(total)

    def _over_shares(self, values: Tensor) -> Tensor:
        # All processes must reach this all-reduce; those that repeat a share's values add 0.
        values = values.to(self.device)
        contribution = values.clone() if represents_share() else torch.zeros_like(values)
        dist.all_reduce(contribution)
        return contribution


def _parts_of(loss: Loss, totals: Totals) -> Consumer:
    """Return the function by which the last pipeline stage computes a micro-batch's shares of loss and metrics."""

    def consume(log_probabilities: Tensor, signal: Signal) -> tuple[Tensor, Tensor]:
        parts = loss(log_probabilities, signal, totals)
        return parts[0], stacked(parts)

    return consume
