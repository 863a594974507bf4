"""Test program that trains a few steps with Megatron for each of several cases; `ranks.py` forks its ranks.

    megatron_program FOLDER

`FOLDER/models` holds the models. A case leaves `FOLDER/results/PROCESSES-INDEX.pt`, a `Result` as a dictionary, and the
trained model in `FOLDER/exported/PROCESSES-INDEX`.
"""

import json
import sys
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor

from stages.data.batch import Batch, Signal
from stages.engines.balance import num_tokens
from stages.engines.loss import Loss
from stages.engines.megatron.compat import prepare_megatron
from stages.kinds.train.config import TrainConfig
from stages.models.facts import ModelFacts
from stages.parallel.processes import joined_processes
from tests.parity.fsdp_program import pack
from tests.parity.megatron_cases import Case, cases, global_batches, train_config

prepare_megatron()
from stages.engines.megatron.adapter import learned_factors  # noqa: E402
from stages.engines.megatron.engine import MegatronEngine  # noqa: E402
from stages.engines.megatron.optimizer_shards import local_optimizer_shards  # noqa: E402
from stages.engines.megatron.parallel import represents_share  # noqa: E402
from stages.engines.megatron.parameter_shards import local_parameter_shards  # noqa: E402
from stages.engines.megatron.weights import named_weights  # noqa: E402


@dataclass(frozen=True)
class Result:
    """Results of a case on Megatron, collected on rank 0: predictions, gradients, losses and metrics."""

    log_probabilities: Tensor
    """Log-probabilities of the first global batch's targets before training, float32 [rows, sequence]."""
    greedy: Tensor
    """Most probable token at each position of the first row before training, int64 [sequence]."""
    gradients: dict[str, Tensor]
    """Gradients of the first global batch before training, by the weights' Hugging Face names. Gradients of an adapter
    are those after all steps, since its LoRA A gets none while B is still 0."""
    losses: list[float]
    grad_norms: list[float]
    evaluation_loss: float
    """Loss on the first global batch after all training steps."""
    continued_loss: float
    """Loss on the first global batch after a new engine has loaded the adapter exported by SFT."""
    metrics: list[dict[str, float]]
    aux_losses: list[float]


def main() -> None:
    torch.set_num_threads(1)
    folder = Path(sys.argv[1])
    (folder / "results").mkdir(exist_ok=True)
    with joined_processes() as device:
        for index in json.loads(sys.argv[2]):
            case = cases(dist.get_world_size())[index]
            config = TrainConfig.model_validate(train_config(case))
            model = folder / "models" / case.model
            engine = MegatronEngine(ModelFacts(model), config.engine_settings, device)
            name = f"{dist.get_world_size()}-{index}"
            result = run(engine, config, case)
            engine.export(folder / "exported" / name, torch.float32)
            parallel_state.destroy_model_parallel()
            if case.adapter and case.method == "sft":
                found = continued_loss(model, config, case, device, folder / "exported" / name)
                result = replace(result, continued_loss=found)
            if dist.get_rank() == 0:
                torch.save(asdict(result), folder / "results" / f"{name}.pt")


def run(engine: Any, config: TrainConfig, case: Case) -> Result:
    shares = [share(rows, engine, config) for rows in global_batches(case.data)]
    if config.needs_reference:
        shares = [[with_reference(engine, batch) for batch in batches] for batches in shares]
    loss = config.learning.build_loss(config.method_options)
    of_row, greedy = engine.predictions(pack(global_batches(case.data)[0][:1]))
    log_probabilities, gradients = values_and_gradients(engine, shares[0], loss, config)
    assert torch.allclose(of_row[0], log_probabilities[0], atol=1e-5)
    outcomes = [engine.train_step(batches, loss, config.learning_rate, config.max_grad_norm) for batches in shares]
    evaluation = engine.evaluate(iter(shares[0]), loss)
    if case.adapter:
        _, gradients = values_and_gradients(engine, shares[0], loss, config)
    return Result(
        log_probabilities,
        greedy[0],
        gradients,
        [outcome.loss for outcome in outcomes],
        [outcome.grad_norm for outcome in outcomes],
        evaluation.loss,
        evaluation.loss,
        [outcome.metrics for outcome in outcomes],
        [outcome.measured["aux_loss"] for outcome in outcomes if "aux_loss" in outcome.measured],
    )


def continued_loss(model: Path, config: TrainConfig, case: Case, device: torch.device, start: Path) -> float:
    dist.barrier()  # rank 0 has written it
    engine = MegatronEngine(ModelFacts(model), config.engine_settings, device, start)
    batches = share(global_batches(case.data)[0], engine, config)
    loss = config.learning.build_loss(config.method_options)
    found = engine.evaluate(iter(batches), loss).loss
    parallel_state.destroy_model_parallel()
    return found


def share(rows: list[Any], engine: Any, config: TrainConfig) -> list[Batch]:
    """Return the micro-batches of a global batch on which this data-parallel rank trains."""
    num_rows = len(rows) // engine.data_parallel_size
    own, size = rows[engine.data_rank * num_rows :][:num_rows], config.layout.micro_batch_size
    return [pack(own[start : start + size]) for start in range(0, num_rows, size)]


def with_reference(engine: Any, batch: Batch) -> Batch:
    return batch.with_reference(engine.document_log_probabilities(batch))


def values_and_gradients(
    engine: Any, batches: list[Batch], loss: Loss, config: TrainConfig
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the log-probabilities of a global batch in row order, and the gradients of its mean loss by weight."""
    totals = engine._totals(batches, loss)
    if engine._balance:
        engine._balance.begin_step(num_tokens(batches, engine.sum_over_data))
    engine._adam.zero_gradients()

    def mean(log_probabilities: Tensor, signal: Signal) -> tuple[Tensor, Tensor]:
        return loss(log_probabilities, signal, totals)[0], log_probabilities.detach()

    found = engine._pipeline.run(batches, mean, backward=True)
    everyones: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyones, (engine.data_rank, torch.cat(found)) if represents_share() else None)
    values = [values for _, values in sorted(filter(None, everyones), key=lambda entry: entry[0])]
    own = sharded_gradients(engine) if config.layout.optimizer_shards > 1 else whole_gradients(engine)
    return torch.cat(values), under_their_names(engine, own)


def whole_gradients(engine: Any) -> dict[Tensor, Tensor]:
    """Return the gradients of all parameters on this process, for optimizers whose state is not sharded."""
    parameters = (parameter for chunk in engine._chunks for parameter in chunk.parameters())
    return {parameter: parameter.main_grad for parameter in parameters if parameter.requires_grad}


def sharded_gradients(engine: Any) -> dict[Tensor, Tensor]:
    """Return the gradients of all parameters, assembled from the ranges that a sharded optimizer keeps on each rank."""
    engine._adam.grad_norm()  # gives the optimizer its ranges
    found = local_parameter_shards(engine._chunks, engine._shape)
    parts = [(part, parameter) for part, parameter in found if parameter.requires_grad]
    gradients = {part: torch.zeros(parameter.numel()) for part, parameter in parts}
    for shard in local_optimizer_shards(engine._chunks, engine._shape, engine._adam.megatron):
        gradients[shard.part][shard.start :][: shard.master.numel()] = shard.master.grad
    experts = [gradient for part, gradient in gradients.items() if part.rule.of_experts]
    dense = [gradient for part, gradient in gradients.items() if not part.rule.of_experts]
    add_up(dense, parallel_state.get_data_parallel_group(with_context_parallel=True, partial_data_parallel=True))
    add_up(experts, parallel_state.get_expert_data_parallel_group(partial_expert_data_parallel=True))
    return {parameter: gradients[part].view(parameter.shape) for part, parameter in parts}


def add_up(tensors: list[Tensor], group: Any) -> None:
    """Sum several tensors in place over the processes of a group, in one all-reduce."""
    if tensors:
        total = torch.cat(tensors)
        dist.all_reduce(total, group=group)
        for tensor, summed in zip(tensors, total.split([tensor.numel() for tensor in tensors]), strict=True):
            tensor.copy_(summed)


def under_their_names(engine: Any, gradients: dict[Tensor, Tensor]) -> dict[str, Tensor]:
    """Return gradients by their weights' Hugging Face names, on rank 0, through the export; then restore weights."""
    weights = {parameter: parameter.detach().clone() for parameter in gradients}
    for parameter, gradient in gradients.items():
        parameter.data.copy_(gradient)
    if engine._adapter:
        named = learned_factors(engine._chunks, engine._shape)
    else:
        given = named_weights(engine._chunks, engine._shape, torch.float32, learning_only=True)
        named = {name: value.clone() for name, value in given}
    for parameter, weight in weights.items():
        parameter.data.copy_(weight)
    return named
