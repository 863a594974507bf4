"""Checkpoints of weights and optimizer state of the Megatron engine, as sharded tensors of Megatron-core.

Names and shapes in the files are those of the Transformers model, so that a run continues under any layout and either
engine. Random numbers, data order and learning rate are functions of the step, which is in the folder's name.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cached_property
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.dist_checkpointing.strategies.torch import MCoreSavePlanner, mcore_to_pyt_state_dict
from megatron.core.models.gpt import GPTModel
from megatron.core.optimizer import MegatronOptimizer
from torch import Tensor
from torch.distributed.checkpoint import DefaultLoadPlanner

from stages.engines.megatron.optimizer_shards import (
    OptimizerShard,
    WeightBlock,
    local_optimizer_shards,
    make_moments,
    real_optimizers,
)
from stages.models.shape import ModelShape
from stages.models.stored_tensors import CheckpointReader, check_stored

Identity = tuple[object, ...]


class MegatronState:
    """Weights and optimizer state of this process's model chunks, saved to and loaded from checkpoints."""

    def __init__(self, chunks: Sequence[GPTModel], model: ModelShape, optimizer: MegatronOptimizer) -> None:
        """Create saver and loader of the optimizer's model chunks, not wrapped for data parallelism. Collective."""
        self._chunks = chunks
        self._model = model
        self._optimizer = optimizer
        # The writing thread has collectives of its own, which must not meet those of training in one group.
        self._group = dist.new_group(backend="gloo")
        self._writer = ThreadPoolExecutor(1, "checkpoint")

    def save(self, folder: Path) -> Future[None]:
        """Copy the state to host memory and write it in a thread, until all processes have. Collective."""
        tensors = defaultdict(list)
        for shard in self._shards:
            if _identity(shard) in self._owned:
                for tensor in self._described(shard, _copied):
                    tensors[tensor.key].append(tensor)
        # Copies from here on: training may change the weights while the thread writes.
        return self._writer.submit(self._write, folder, dict(tensors))

    def load(self, folder: Path) -> None:
        """Load this process's share of a checkpoint of either engine and any layout. Collective.

        Raises ModelError when it is another's. With overlapped gathering, parameters must be gathered afterwards.
        """
        # Before the first step there are no moments, and loading writes into tensors in place.
        make_moments(self._optimizer)
        tensors = defaultdict(list)
        steps: dict[str, Tensor] = {}
        for shard in self._shards:
            for tensor in self._described(shard, _in_place):
                tensors[tensor.key].append(tensor)
            steps |= {block.weight: torch.zeros(()) for block in shard.blocks(self._model)}
        # Step counts are scalars, which every process reads for itself.
        tensors |= {_step_key(weight): [_sharded(_step_key(weight), step, (), ())] for weight, step in steps.items()}
        check_stored(folder, {key: found[0].global_shape for key, found in tensors.items()})
        planner = DefaultLoadPlanner(flatten_state_dict=False)
        state = mcore_to_pyt_state_dict(tensors, is_loading=True)
        dcp.load(state, storage_reader=CheckpointReader(folder), process_group=self._group, planner=planner)
        self._take_over(steps)

    def _write(self, folder: Path, tensors: dict[str, list[ShardedTensor]]) -> None:
        planner = MCoreSavePlanner(flatten_state_dict=False)
        dcp.save(mcore_to_pyt_state_dict(tensors), checkpoint_id=folder, process_group=self._group, planner=planner)

    def _take_over(self, steps: dict[str, Tensor]) -> None:
        for shard in self._shards:
            for block in shard.blocks(self._model):
                shard.count_steps(steps[block.weight])
                break  # a shard has one step count, whichever of its weights it is read from
        for optimizer in real_optimizers(self._optimizer):
            if hasattr(optimizer, "_copy_main_params_to_model_params"):
                optimizer._copy_main_params_to_model_params()  # bf16 parameters follow from their fp32 masters

    @property
    def _shards(self) -> list[OptimizerShard]:
        return local_optimizer_shards(self._chunks, self._model, self._optimizer)

    @cached_property
    def _owned(self) -> set[Identity]:
        """Shards of optimizer state that this process writes: those that no process before it holds."""
        mine = [_identity(shard) for shard in self._shards if not shard.part.is_copy]
        everyones: list[list[Identity]] = [[]] * dist.get_world_size()
        dist.all_gather_object(everyones, mine)
        before = {identity for found in everyones[: dist.get_rank()] for identity in found}
        return set(mine) - before

    def _described(
        self, shard: OptimizerShard, take: Callable[[Tensor, WeightBlock], Tensor]
    ) -> Iterator[ShardedTensor]:
        """Yield a shard's tensors as a checkpoint stores them: master weights, moments and step count.

        The first two are cut into rectangles of Hugging Face weights. take: copies a block or returns a view of it.
        """
        moments = shard.moments
        for block in shard.blocks(self._model):
            kept = {f"model.{block.weight}": shard.master}
            kept |= {f"optimizer.state.{block.weight}.{name}": moment for name, moment in moments.items()}
            for key, tensor in kept.items():
                yield _sharded(key, take(tensor, block), block.weight_shape, block.offset)
            # One process writes a weight's step: the one with its first element.
            if take is _copied and block.is_first:
                yield _sharded(_step_key(block.weight), shard.step, (), ())


def _identity(shard: OptimizerShard) -> Identity:
    return shard.part.key, shard.part.index, shard.start, shard.master.numel()


def _in_place(tensor: Tensor, block: WeightBlock) -> Tensor:
    """Return one block (rectangle) of a weight as a view of the flattened tensor that holds it."""
    flat = tensor.detach().view(-1)[block.start :]
    return flat[: torch.Size(block.shape).numel()].view(block.shape)


def _copied(tensor: Tensor, block: WeightBlock) -> Tensor:
    """Return a copy of a weight's block in host memory, so that training may go on while it is written."""
    return _in_place(tensor, block).to("cpu", copy=True)


def _step_key(weight: str) -> str:
    return f"optimizer.state.{weight}.step"


def _sharded(key: str, data: Tensor, whole: tuple[int, ...], offset: tuple[int, ...]) -> ShardedTensor:
    # Without fragmentations: blocks of one weight need not be equally large.
    return ShardedTensor(key, data, data.dtype, tuple(data.shape), whole, offset, None)
