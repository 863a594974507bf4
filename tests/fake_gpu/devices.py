"""Fake GPUs for tests: one process acts as a rank of a group of any size, with tensors that have shapes but no data.

FakeTensorMode computes shapes and torch's "fake" process group answers every collective at once. In a build of torch
for CPUs, autograd has no CUDA device, so the fake GPU has the type "cpu" and CUDA's row of `DEVICE_TYPES`: flash
attention, collectives and memory are those of a GPU.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from functorch.compile import make_boxed_func, min_cut_rematerialization_partition
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd
from torch._inductor.decomposition import select_decomp_table
from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultReduceScatter
from torch.nn.attention.flex_attention import AuxOutput
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers.models.qwen2_audio import modeling_qwen2_audio

from stages.data import batch
from stages.engines import attention_kernels, log_probabilities
from stages.engines.context import TokenSlice
from stages.engines.fsdp import engine, experts, model, offload, parallelize, shards
from stages.engines.fsdp.drawn import DrawnDocuments
from stages.engines.fsdp.model import find_weights
from stages.engines.weight_slices import WeightFiles
from stages.kinds.train.methods.sft import SftLoss
from stages.parallel import accelerator
from stages.parallel.device_types import DEVICE_TYPES, device_type

DEVICE = torch.device("cpu")
GPU = replace(device_type("cuda"), torch_type="cpu", pins_host_memory=False)


@contextmanager
def replaced(replacements: Iterable[tuple[Any, str, Any]]) -> Iterator[None]:
    """Replace attributes of objects until the `with` block ends, given (object, attribute name, new value)."""
    with ExitStack() as stack:
        for target, name, replacement in replacements:
            stack.enter_context(mock.patch.object(target, name, replacement))
        yield


@contextmanager
def fake_gpus(num_ranks: int, rank: int = 0) -> Iterator[None]:
    """Make this process one of `num_ranks` ranks on fake GPUs; every tensor that it creates is fake, without data."""
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=num_ranks)
    accelerator.of_device.cache_clear()
    try:
        with replaced(_REPLACED), FakeTensorMode(allow_non_fake_inputs=True):
            yield
    finally:
        accelerator.of_device.cache_clear()
        dist.destroy_process_group()


def _read(files: WeightFiles, name: str, *index: slice) -> Tensor:
    """Stand in for `WeightFiles.read`: return a bf16 tensor of the right shape without reading its data."""
    return torch.empty(files._slices[name].get_shape(), dtype=torch.bfloat16)[index or ...]


def _load_model(folder: Path, *, reads_weights: bool, **options: Any) -> Any:
    """Stand in for `load_model`: build the model without reading its weights."""
    return find_weights(folder, **options)[0]


def _apply(module: nn.Module, function: Any, recurse: bool = True) -> nn.Module:
    """Replace a module's parameters in place of `nn.Module._apply`: fake data can be neither changed nor swapped."""
    for child in module.children() if recurse else ():
        child._apply(function)
    for name, parameter in module._parameters.items():
        if parameter is not None and (applied := function(parameter.detach())) is not parameter:
            module._parameters[name] = nn.Parameter(applied, parameter.requires_grad)
    for name, buffer in module._buffers.items():
        if buffer is not None:
            module._buffers[name] = function(buffer)
    return module


def _all_gather_object(everyones: list[Any], own: Any, group: Any = None) -> None:
    """Stand in for `all_gather_object`: fill the list as if every rank had sent this rank's object."""
    everyones[:] = [own] * len(everyones)


def _without_backend(new_group: Callable[..., Any]) -> Callable[..., Any]:
    """Return a stand-in for `dist.new_group` that makes a fake process group, whichever backend is asked for."""
    return lambda *arguments, backend=None, **options: new_group(*arguments, **options)


def _rand(rand: Any, *size: Any, **options: Any) -> Any:
    return 1.0 if size == ([],) else rand(*size, **options)


def _real(function: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a function that reads tensor values, so that it gets real tensors although all other tensors are fake."""

    def with_values(*arguments: Any, **options: Any) -> Any:
        with unset_fake_temporarily():
            return function(*arguments, **options)

    return with_values


def _on_cpu(function: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a function that computes on the CPU, which is a GPU to all others: a GPU's kernels would refuse fp64."""

    def on_cpu(*arguments: Any, **options: Any) -> Any:
        accelerator.of_device.cache_clear()
        try:
            with replaced([(accelerator, "DEVICE_TYPES", DEVICE_TYPES)]):
                return _real(function)(*arguments, **options)
        finally:
            accelerator.of_device.cache_clear()

    return on_cpu


def _equal_counts(chosen: Tensor, num_own: int, group: dist.ProcessGroup) -> tuple[list[int], list[int], Tensor]:
    """Stand in for `exchanged_counts`: each process sends and gets the same share of the pairs."""
    counts = [chosen.numel() // group.size()] * group.size()
    arriving = torch.empty(group.size() * num_own, dtype=torch.int64)
    dist.all_to_all_single(arriving, torch.empty_like(arriving), group=group)
    return counts, counts, torch.empty(sum(counts), dtype=torch.int64)


class _FlexAttention(torch.autograd.Function):
    """FlexAttention that allocates what its kernels do; torch compiles none while tensors are fake."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        output = query.new_empty(*query.shape[:3], value.shape[3])
        sums = query.new_empty(query.shape[:3], dtype=torch.float32)
        ctx.save_for_backward(query, key, value, output, sums)
        return output, sums

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, ...]:
        return tuple(torch.empty_like(one) for one in ctx.saved_tensors[:3])


def _flex_attention(*states: Tensor, **_: Any) -> tuple[Tensor, AuxOutput]:
    output, sums = _FlexAttention.apply(*states)
    return output, AuxOutput(lse=sums)


def _run_graphs() -> Callable[..., Any]:
    """Return a backend of torch.compile that divides graphs between forward and backward pass as Inductor does.

    It runs them operation by operation: what a layer keeps is exact, what it needs for a moment is more than fused.
    """

    def run_graph(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        return make_boxed_func(graph.forward)

    return aot_autograd(
        fw_compiler=run_graph,
        partition_fn=min_cut_rematerialization_partition,
        decompositions=select_decomp_table,
    )


_REPLACED: tuple[tuple[Any, str, Any], ...] = (
    (accelerator, "DEVICE_TYPES", (GPU,)),
    (parallelize, "init_device_mesh", _real(init_device_mesh)),
    # By the ranks in a mesh.
    (DeviceMesh, "_concatenate", staticmethod(_real(DeviceMesh._concatenate))),
    (DeviceMesh, "_create_unflatten_mesh", _real(DeviceMesh._create_unflatten_mesh)),
    # A fake index would be read as some number.
    (shards, "compute_local_shape_and_global_offset", _real(shards.compute_local_shape_and_global_offset)),
    (model, "logits_transform", _real(model.logits_transform)),  # by values that a model gives
    (model, "drawn_documents", _real(model.drawn_documents)),  # tries a processor by values
    (DrawnDocuments, "smallest", property(_real(DrawnDocuments.smallest.func))),  # of a processor, by values
    (model, "probe", _on_cpu(model.probe)),  # compares log-probabilities by value, in fp64
    (experts, "exchanged_counts", _equal_counts),
    (engine, "load_model", _load_model),
    (engine, "check_sharded", lambda *_: None),  # compares log-probabilities by value
    (engine, "check_split", lambda *_: None),  # and so does this
    (engine, "deepcopy", lambda one: one),  # of the model, for that
    (parallelize, "AllToAllReduceScatter", DefaultReduceScatter),
    (batch, "target_positions", _real(batch.target_positions)),  # on the host
    (TokenSlice, "own_positions", _real(TokenSlice.own_positions)),
    (SftLoss, "counts", _real(SftLoss.counts)),
    (attention_kernels, "_compiled_flex", lambda: _flex_attention),
    (torch, "compile", partial(torch.compile, backend=_run_graphs())),
    (log_probabilities, "_compiled", lambda function: function),  # else its graphs, not fused, would hold fp32 logits
    (WeightFiles, "read", _read),
    (nn.Module, "_apply", _apply),
    # Its memory does not count: a "meta" tensor is on no device.
    (offload, "host_memory", lambda num_bytes, pinned: torch.empty(num_bytes, dtype=torch.uint8, device="meta")),
    # They compare numbers of tokens by value, of which a document of another form would be guessed.
    (modeling_qwen2_audio, "torch_compilable_check", lambda *_: None),
    (modeling_qwen2_audio, "is_torchdynamo_compiling", lambda: True),
    # By a number between 0 and 1 a layer of its tower is left out at random: unknown, it would leave out all of them.
    (torch, "rand", partial(_rand, torch.rand)),
    (dist, "all_gather_object", _all_gather_object),
    (dist, "new_group", _without_backend(dist.new_group)),
)
"""Replacements of functions that need tensor values, files or a device, in force while GPUs are fake."""


@contextmanager
def megatron_on_fake_gpus() -> Iterator[None]:
    """Let Megatron-core run on fake GPUs (inside `fake_gpus`) until the `with` block ends."""
    from stages.engines.megatron.compat import prepare_megatron

    with unset_fake_temporarily():
        prepare_megatron()
    from megatron.core import optimizer, parallel_state
    from megatron.core.tensor_parallel import random

    from stages.engines.megatron import pipeline, spec, weights

    changed = (
        (pipeline, "split_tokens", _real(pipeline.split_tokens)),
        (weights, "_check_files", lambda *_: None),  # asks the other pipeline stages what they need
        (random.CudaRNGStatesTracker, "fork", lambda *_: nullcontext()),  # compares the host's states by value
        (spec.RMSNorm, "forward", lambda norm, states: _RMSNorm.apply(states, norm.weight)),
    )
    # Megatron's view of torch, made by `prepare_megatron`, keeps functions that it has once looked up.
    seen_by_megatron = vars(optimizer.torch.distributed)
    seen_by_megatron.pop("all_gather_object", None)
    try:
        with replaced(changed):
            yield
    finally:
        seen_by_megatron.pop("all_gather_object", None)
        parallel_state.destroy_model_parallel()


class _RMSNorm(torch.autograd.Function):
    """RMS norm that allocates as little memory as the fused GPU kernel, unlike torch's implementation on a CPU."""

    @staticmethod
    def forward(ctx: Any, states: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(states, weight, states.new_empty(states.shape[:-1], dtype=torch.float32))
        return states.mul(weight)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor]:
        states, weight, _ = ctx.saved_tensors
        return states.mul(weight), weight.clone()
