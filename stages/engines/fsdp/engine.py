"""Training engine on FSDP2 (`torch.distributed.fsdp.fully_shard`): data parallelism, sharded or hybrid.

Weights, gradients and Adam's moments are fp32 and sharded; layers compute in `compute_dtype` and gradients are reduced
in fp32. One process is a group of one, at no measurable cost.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from copy import deepcopy
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from stages.adapters.config import AdapterConfig
from stages.adapters.files import check_mergeable, write_adapter
from stages.core.contract import is_main_process
from stages.core.errors import ModelError
from stages.data.batch import Batch
from stages.engines.balance import METRIC, num_tokens
from stages.engines.context import TokenSlice
from stages.engines.engine import LossMeans, StepOutcome, free_memory
from stages.engines.export import (
    ScoreHead,
    check_exportable,
    export_model,
    weight_shapes,
    weights_as_stored,
    with_carried,
)
from stages.engines.fsdp.eight_bits import float8_config, multiply_in_eight_bits
from stages.engines.fsdp.expert_choices import ExpertChoices
from stages.engines.fsdp.model import TargetLogProbabilities, find_weights, load_model
from stages.engines.fsdp.moe import check_mixture, freeze_routers
from stages.engines.fsdp.mtp import METRIC as MTP_METRIC
from stages.engines.fsdp.mtp import add_mtp, num_targets, one_ahead
from stages.engines.fsdp.optimizer import build_optimizer, convert_to_bf16, decayed_parameters, full_tensor, local_of
from stages.engines.fsdp.parallelize import batch_groups, check_slices, device_mesh, parallelize
from stages.engines.fsdp.parts import freeze_parts, learning_rate_ratios
from stages.engines.fsdp.score import with_score_head
from stages.engines.fsdp.shards import check_sharded, check_split, drop_weights, read_shards
from stages.engines.fsdp.sources import ModelFiles
from stages.engines.fsdp.state import TrainingState
from stages.engines.fsdp.tensor_parallel import is_split
from stages.engines.loss import Loss, means, read, stacked, totals_of
from stages.engines.settings import EngineSettings
from stages.models.carried_weights import carried_names
from stages.models.facts import ModelFacts
from stages.models.layers import freeze_unused
from stages.models.loading import Head
from stages.models.media import MediaKind
from stages.models.mtp_weights import ATTRIBUTE
from stages.models.transformers_flops import model_flops
from stages.parallel.layout import Layout

if TYPE_CHECKING:
    from peft import LoraConfig
    from torchao.float8 import Float8LinearConfig

    from stages.engines.fsdp.eva import InputRows


class FsdpEngine:
    """Training engine on FSDP2; `stages.engines.engine.Engine` describes its methods."""

    def __init__(
        self,
        model: ModelFacts,
        settings: EngineSettings,
        device: torch.device,
        start: Path | None = None,
        rows: InputRows | None = None,
    ) -> None:
        """Load the model from its folder and shard it by `settings.layout`; the process group must exist.

        start: folder of an adapter that training starts from. rows: training rows for an adapter with `init: eva`.
        """
        self._source, self._folder = model, model.folder
        self._trust_remote_code = settings.trust_remote_code
        self._start = start
        self.device, self.num_devices = device, dist.get_world_size()
        self.data_parallel_size = settings.layout.data_parallel_size
        # The processes of `tp` are neighbours, and so are those groups of them that share tokens.
        self.token_rank = dist.get_rank() // settings.layout.tp
        self.data_rank = self.token_rank // settings.layout.cp
        self.compute_dtype = torch.float32 if settings.precision == "fp32" else torch.bfloat16
        float8 = float8_config(settings.fp8_recipe) if settings.precision == "fp8" else None
        self._moe = settings.moe
        self._balances_experts = settings.moe.aux_loss_coefficient > 0
        self._accumulates_sharded = settings.layout.accumulate == "sharded"
        self._mesh = device_mesh(settings.layout, device)
        self._data_group, self._context_group = batch_groups(settings.layout, device)
        # The model is built whole, changed (adapter, head, precision), and sharded last: each change below looks at
        # modules and parameters as Transformers has them, and FSDP2 replaces both.
        self._model, files = self._start_model(settings.adapter, settings.media.kinds if settings.media else ())
        self.verdict = self._model.verdict
        self.tags: Mapping[str, str] = self.verdict.tags
        # The base's parameters, before adapter and score head add others that no file has.
        read_later = list(self._model.parameters()) if files else []
        check_mixture(self._model.causal_lm, settings.moe)
        # Before the adapter, which freezes the base and then lets its own factors learn, those of routers too.
        if settings.media:
            freeze_parts(self._model.causal_lm, settings.media)
        else:
            freeze_unused(self._model.causal_lm)
        self._mtp_loss_weight = settings.mtp_loss_weight
        if settings.mtp_loss_weight:
            add_mtp(self._model.causal_lm, model.folder)
        if settings.moe.freeze_router:
            freeze_routers(self._model.causal_lm)
        self._adapter = self._add_adapter(settings, rows) if settings.adapter else None
        if not self._adapter:
            check_exportable(self._model.causal_lm, model.folder)  # with the files' own head: before the score head
        self._score_head: ScoreHead | None = None
        if settings.has_score_head:
            self._model, self._score_head = with_score_head(self._model, self._folder, settings.seed)
        drop_weights(self._model, read_later)  # to `meta`: each process reads the rows of its shards once it has them
        # After adapter and head, and before base weights are quantized: codes have other shapes than their matrices.
        self.flops = model_flops(self._model.causal_lm, predicts_ahead=settings.mtp_loss_weight > 0)
        if settings.adapter:
            from stages.adapters.lora import store_base
            from stages.adapters.lora_linear import fuse_products

            store_base(self._model.causal_lm, settings.adapter.base_precision, self.compute_dtype)
            fuse_products(self._model.causal_lm)
        # Before sharding: FSDP2 keeps the dtype that it finds.
        if settings.low_precision.bf16_stochastic_round:
            convert_to_bf16(self._model.causal_lm)
        # By the classes of modules, which FSDP2 changes.
        decayed = None if settings.adam.decay_norms_and_biases else decayed_parameters(self._model.causal_lm)
        ratios = learning_rate_ratios(self._model.causal_lm, settings.media)
        self._parallelize(settings.layout, files, float8, replays_experts=settings.replays_experts)
        # After sharding, which replaces parameters by DTensors.
        self._parameters = [parameter for parameter in self._model.parameters() if parameter.requires_grad]
        self._optimizer = build_optimizer(self._model.causal_lm, settings, decayed, ratios)
        self._state = TrainingState(self._model.causal_lm, self._optimizer)

    def train_step(
        self, micro_batches: Sequence[Batch], loss: Loss, learning_rate: float, max_grad_norm: float | None
    ) -> StepOutcome:
        """Make one optimizer step over a global batch of micro-batches.

        Gradients are reduced once, with the last micro-batch, or with each, as the layout says; either way they are
        added up in fp32, and losses come divided by the counts of the global batch.
        """
        self._model.train()
        # Before the first forward pass: each micro-batch's loss is divided by the counts of the whole global batch.
        totals = totals_of(loss, micro_batches, self._over_shares)
        num_balanced = num_tokens(micro_batches, self._over_shares) if self._balances_experts else torch.ones(())
        balance_weight = (self._moe.aux_loss_coefficient / num_balanced).float()
        added_up: list[Tensor] = []
        balances: list[Tensor] = []
        # Shifted on the host, where the positions of targets are found without waiting for the device.
        ahead = [one_ahead(batch) for batch in micro_batches] if self._mtp_loss_weight else []
        num_ahead = num_targets(ahead, self._over_shares)
        losses_ahead: list[Tensor] = []
        for index, batch in enumerate(micro_batches):
            is_last = index == len(micro_batches) - 1
            # Without it gradients stay whole on every process until the last micro-batch, which reduces the sum.
            self._model.set_requires_gradient_sync(is_last or self._accumulates_sharded)
            self._model.set_requires_all_reduce(is_last)  # replicas only need to agree on the sum
            on_device = self._moved(batch)
            following = ahead[index].to(self.device) if ahead else None
            output = self._model(on_device, balances_experts=self._balances_experts, ahead=following)
            log_probabilities, *others = output if isinstance(output, tuple) else (output,)
            parts = loss(log_probabilities, on_device.signal, totals)
            total = parts[0]
            if following:
                loss_ahead = -others.pop().sum() / num_ahead
                total = total + self._mtp_loss_weight * loss_ahead
                losses_ahead.append(loss_ahead.detach())
            # Without a balancing loss the sum is its start.
            sum((balance_weight * one for one in others), total).backward()
            added_up.append(stacked(parts))
            balances += [one.detach() for one in others]
        # As FSDP2 does for its own (`reduce_unused`): AdamW would not decay a weight without a gradient.
        for parameter in self._parameters:
            if parameter.grad is None and not isinstance(parameter, DTensor):
                parameter.grad = torch.zeros_like(parameter)
        # [micro-batches, 1 + metrics] → [1 + metrics], then over processes
        summed = self._all_reduce(torch.stack(added_up).sum(0))
        named = {METRIC: self._all_reduce(torch.stack(balances).sum()) / num_balanced} if balances else {}
        if losses_ahead:
            named[MTP_METRIC] = self._all_reduce(torch.stack(losses_ahead).sum())
        # The one time that a step waits for the device.
        (grad_norm,), numbers, *values = read(self._grad_norm(), summed, *named.values())
        measured = {name: value for name, (value,) in zip(named, values, strict=True)}
        mean, metrics = means(numbers, loss)
        # Both are reduced, so that every process skips the step or none does; the loop then raises.
        if math.isfinite(mean) and math.isfinite(grad_norm):
            self._update(learning_rate, grad_norm, max_grad_norm)
        self._optimizer.zero_grad()
        return StepOutcome(mean, metrics, grad_norm, measured)

    def evaluate(self, micro_batches: Iterable[Batch], loss: Loss) -> LossMeans:
        batches = list(micro_batches)
        totals = totals_of(loss, batches, self._over_shares)
        added_up: list[Tensor] = []
        for batch in batches:
            on_device = self._moved(batch)
            added_up.append(stacked(loss(self._forward_only(on_device), on_device.signal, totals)))
        return LossMeans(*means(self._all_reduce(torch.stack(added_up).sum(0)).tolist(), loss))

    def document_log_probabilities(self, batch: Batch) -> Tensor:
        on_device = self._moved(batch)
        return on_device.signal.log_probabilities(self._forward_only(on_device)).cpu()

    def target_log_probabilities(self, batch: Batch) -> Tensor:
        return self._forward_only(self._moved(batch)).cpu()

    def routed_log_probabilities(self, batch: Batch) -> tuple[Tensor, Tensor]:
        assert self._model.choices, "the settings say `replays_experts`"
        with self._model.choices.recording() as recorded:
            return self.target_log_probabilities(batch), recorded().cpu()

    def predictions(self, batch: Batch) -> tuple[Tensor, Tensor]:
        on_device = self._moved(batch)
        return self._forward_only(on_device).cpu(), self._forward_only(on_device, greedy=True).cpu()

    def likeliest_tokens(self, batch: Batch, number: int) -> tuple[Tensor, Tensor]:
        tokens, values = self._forward_only(self._moved(batch), num_likeliest=number).cpu().unbind(2)
        return tokens.long(), values

    def sum_over_data(self, values: Tensor) -> Tensor:
        return self._over_shares(values).cpu()

    def broadcast_from_rank0(self, value: float) -> float:
        if self.num_devices == 1:
            return value
        holder = torch.tensor(value, dtype=torch.float64, device=self.device)
        dist.broadcast(holder, src=0)
        return holder.item()

    def save(self, folder: Path) -> Future[None]:
        """Write a checkpoint by torch.distributed.checkpoint in the background, from a copy in host memory."""
        return self._state.save(folder)

    def load(self, folder: Path) -> None:
        self._state.load(folder)

    @property
    def checkpoint_bytes(self) -> int:
        """Size of a checkpoint in bytes: trainable weights, and AdamW's two moments or Muon's one in fp32."""
        return sum(
            (parameter.itemsize + (4 if group["is_muon"] else 8)) * parameter.numel()
            for group in self._optimizer.param_groups
            for parameter in group["params"]
        )

    def export(self, folder: Path, dtype: torch.dtype) -> list[ModelError]:
        if self._adapter:
            from stages.adapters.check import loading_problem

            learning = {name for name, one in self._model.causal_lm.named_parameters() if one.requires_grad}
            # A state dict, not parameters: those are still gathered after an evaluation, in the dtype of computation,
            # where `reshard_after_forward` is false. Gathering is collective, so before other ranks return.
            weights = self._model.causal_lm.state_dict()
            learned = {name: full_tensor(weights[name]).cpu() for name in sorted(learning)}
            if not is_main_process():
                return []
            start = self._taken_out, self._merged
            problems = write_adapter(folder, learned, self._adapter.to_dict(), self._folder, dtype, *start)
            head: Head = "pictures" if self._model.drawn else "tokens"
            unloadable = loading_problem(folder, self._folder, trust_remote_code=self._trust_remote_code, head=head)
            return [*problems, *([unloadable] if unloadable else [])]
        export_model(
            self._model.causal_lm,
            self._gathered(),
            source=self._source,
            folder=folder,
            dtype=dtype,
            score=self._score_head,
        )
        return []

    def whole_weights(self, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
        causal_lm, source = self._model.causal_lm, self._source
        carried = carried_names(causal_lm, weight_shapes(source.folder))
        return with_carried(weights_as_stored(causal_lm, self._gathered(), source, dtype), source.folder, carried)

    def _gathered(self) -> Iterator[tuple[str, Tensor]]:
        """Yield each whole weight of the model, gathered one at a time, in the same order on every rank."""
        return ((name, full_tensor(value)) for name, value in self._model.causal_lm.state_dict().items())

    def close(self) -> None:
        """Free the model's weights, gradients and optimizer state; process groups stay."""
        del self._model, self._optimizer, self._parameters, self._state
        free_memory()

    def _start_model(
        self, adapter: AdapterConfig | None, sees: Sequence[MediaKind]
    ) -> tuple[TargetLogProbabilities, ModelFiles | None]:
        """Return the model to train, and its weight files if processes will read their own shards from them.

        Without files the weights are on rank 0: where an adapter is made of whole weights.
        """
        trusts = self._trust_remote_code
        if adapter and adapter.starts_from_weights:
            return load_model(self._folder, reads_weights=is_main_process(), trust_remote_code=trusts, sees=sees), None
        return find_weights(self._folder, trust_remote_code=trusts, sees=sees)

    def _parallelize(
        self,
        layout: Layout,
        files: ModelFiles | None,
        float8: Float8LinearConfig | None,
        *,
        replays_experts: bool,
    ) -> None:
        check_slices(self._model, layout)
        # The base is on `meta`: a copy takes next to no memory. Taken before fp8 layers and sharding change the model.
        twin = deepcopy(self._model) if files else None  # compared in fp32
        if twin and hasattr(twin.causal_lm, ATTRIBUTE):
            delattr(twin.causal_lm, ATTRIBUTE)  # Transformers has none to compare with
        copy = deepcopy(twin) if layout.tp * layout.ep > 1 else None
        for model in (self._model, twin) if twin else (self._model,):
            model.context_group = self._context_group
        if replays_experts:  # before layers are wrapped by checkpoints, which compute them again
            self._model.choices = ExpertChoices(self._model.causal_lm)
        self.note = multiply_in_eight_bits(self._model.causal_lm, float8) if float8 else None
        parallelize(self._model, layout, self._mesh, self.compute_dtype)
        if whole := ", ".join(self._model.left_whole):
            self.note = f"each process has these matrices whole, which the plan for `tp` does not split: {whole}"
            self.tags = {**self.tags, "left_whole_by_tp": whole}
        if files and twin:
            # With `cpu_offload` shards stay in host memory, where FSDP2 expects them.
            read_shards(self._model.causal_lm, files, torch.device("cpu") if layout.cpu_offload else self.device)
            check_sharded(self._model, twin, layout, self._mesh, self.device)
        if layout.tp * layout.ep > 1:
            if not files or not copy or self._adapter:
                # What a plan lacks, the base alone tells: PEFT's layers give its weights no gradients.
                trusts, kinds = self._trust_remote_code, self._model.drawn.kinds if self._model.drawn else ()
                copy, files = find_weights(self._folder, trust_remote_code=trusts, sees=kinds)
                drop_weights(copy, list(copy.parameters()))
            check_split(deepcopy(copy), copy, files, layout, self.device)

    def _add_adapter(self, settings: EngineSettings, rows: InputRows | None) -> LoraConfig:
        """Add the LoRA adapter before sharding; keep factors taken out of the base's weights for the export."""
        # PEFT takes half a second to import: only where there is an adapter.
        from stages.adapters.lora import (
            add_adapter,
            changed_weights,
            factors_of,
            load_trained_adapter,
            merge_into,
            read_start,
        )

        causal_lm = self._model.causal_lm
        assert settings.adapter
        start = read_start(self._start, self._folder) if self._start else None
        self._merged = start if settings.adapter.stack else None
        if self._merged:
            merge_into(causal_lm, self._merged)
        directions = None
        if settings.adapter.init == "eva":
            from stages.engines.fsdp.eva import start_directions

            assert rows, "that are given to an engine whose adapter starts from them"
            directions = start_directions(self._model, settings.adapter, rows, self._folder, self._trust_remote_code)
        elif start and not self._merged and start.has_own_ranks:
            # For their ranks alone: `load_trained_adapter` sets the values.
            directions = {layer: a for layer, (a, _) in start.factors.items()}
        added = add_adapter(
            causal_lm,
            settings.adapter,
            settings.seed,
            has_weights=is_main_process(),
            directions=directions,
            sees=settings.media is not None,
        )
        check_mergeable(changed_weights(causal_lm), self._folder)
        # Before `load_trained_adapter` and training change them: the export needs the first values.
        self._taken_out = factors_of(causal_lm) if settings.adapter.changes_base and is_main_process() else None
        if start and not self._merged:
            load_trained_adapter(causal_lm, start)
        return added

    def _moved(self, batch: Batch) -> Batch:
        """Return a batch on the device, with the positions of this process's targets, which are found on the host."""
        if self._context_group:
            part = TokenSlice(self._context_group, batch.documents.lengths, torch.device("cpu"))
            batch = batch.with_signal(own_positions=part.own_positions(batch.signal))
        return batch.to(self.device)

    @torch.no_grad()
    def _forward_only(self, batch: Batch, **wanted: Any) -> Tensor:
        self._model.eval()
        return self._model(batch, **wanted)

    def _update(self, learning_rate: float, grad_norm: float, max_grad_norm: float | None) -> None:
        if max_grad_norm is not None and grad_norm > max_grad_norm:
            # In place on the shards: one factor for all gradients needs no communication.
            torch._foreach_mul_(self._local_gradients(), max_grad_norm / grad_norm)
        for group in self._optimizer.param_groups:
            group["lr"] = learning_rate * group["learning_rate_ratio"]
        self._optimizer.step()

    def _grad_norm(self) -> Tensor:
        """Return the Euclidean norm of all gradients, float32, which are sharded over the processes of a group."""
        gradients = [one.grad for one in self._parameters if one.grad is not None]
        norms = torch._foreach_norm([*map(local_of, gradients)], 2.0, torch.float32)  # they may be bf16: sum in fp32
        squares = torch.stack(norms).square()
        splits = torch.tensor([is_split(one) for one in gradients], device=squares.device)
        # [over weights that all processes of `tp` have, over those of which each has a part]
        squared = torch.stack([squares.where(~splits, 0.0).sum(), squares.where(splits, 0.0).sum()]).to(self.device)
        if self._mesh.size() > 1:
            # Over shards only: replicas hold the same gradients, which would be counted several times.
            dist.all_reduce(squared, group=self._mesh.get_group("dp_shard"))
        if self._vocabulary_group:
            dist.all_reduce(squared[1], group=self._vocabulary_group)
        return squared.sum().sqrt()

    @property
    def _vocabulary_group(self) -> dist.ProcessGroup | None:
        return self._model.vocabulary_group

    def _local_gradients(self) -> list[Tensor]:
        return [local_of(parameter.grad) for parameter in self._parameters if parameter.grad is not None]

    def _over_shares(self, values: Tensor) -> Tensor:
        """Sum values of the host over processes on the device; one process alone leaves them on the host."""
        return self._all_reduce(values.to(self.device)) if self.data_parallel_size > 1 else values

    def _all_reduce(self, values: Tensor) -> Tensor:
        if self.data_parallel_size > 1:
            dist.all_reduce(values, group=self._data_group)
        return values
