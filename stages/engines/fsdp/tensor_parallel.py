"""Tensor parallelism of Transformers' models: matrices split by the model's own plan, and the vocabulary besides.

A plan names the modules whose weights are split over the processes of `tp`, by columns of their results or of their
inputs (Shoeybi et al. 2019), and where sums over processes are due. What a plan does not name stays whole on each.
Embedding and output head are split by entries of the vocabulary, so that no process has all logits.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from transformers.distributed.tensor_parallel import (
    ALL_PARALLEL_STYLES,
    ColwiseParallel,
    RowwiseParallel,
    TensorParallelLayer,
    replace_layer_number_by_wildcard,
)

from stages.core.errors import ModelError
from stages.models.layers import text_layers

GATHERED = "colwise_gather_output"
"""Style of the head where Transformers computes its logits, to compare with; training never has them whole."""


class _SumGradients(torch.autograd.Function):
    """Identity whose gradient is summed over processes, each of which has the gradient by its own shards."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return values.view_as(values)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        summed = gradients[0].contiguous().clone()
        dist.all_reduce(summed, group=ctx.group)
        return summed, None


class _Sum(torch.autograd.Function):
    """Sum over processes; each gets the whole gradient."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, group: dist.ProcessGroup) -> Tensor:
        summed = values.clone()
        dist.all_reduce(summed, group=group)
        return summed

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0], None


class _SplitVocabulary(TensorParallelLayer):
    """Embedding of which each process has consecutive entries; others look up 0, and the sum is everyone's."""

    def shard_param(self, module: nn.Module, param: str, mesh: DeviceMesh) -> None:
        whole = module.get_parameter(param)
        split = distribute_tensor(whole, mesh, [Shard(0)], src_data_rank=None)
        module._parameters[param] = nn.Parameter(split, requires_grad=whole.requires_grad)

    def install_forward(self, module: Any, mesh: DeviceMesh) -> Any:
        look_up, group, size = module.forward, mesh.get_group(), module.num_embeddings // mesh.size()
        first = mesh.get_local_rank() * size
        padding = module.padding_idx
        module.padding_idx = None if padding is None or not first <= padding < first + size else padding - first

        def forward(tokens: Tensor) -> Tensor:
            places = tokens - first
            is_here = (places >= 0) & (places < size)
            with changed(module, lambda one: one.to_local()):
                found = look_up(places.clamp(0, size - 1))
            return _Sum.apply(found * is_here[..., None], group)

        module.forward = forward
        return module


class _SummedGradients(TensorParallelLayer):
    """Whole weights of a module that sees this process's heads alone: gradients by all heads are summed."""

    def install_forward(self, module: Any, mesh: DeviceMesh) -> Any:
        forward, group = module.forward, mesh.get_group()

        def with_sums(*args: Any, **kwargs: Any) -> Any:
            # In the graph: Transformers' hook would sum again what earlier micro-batches have added up.
            with changed(module, lambda one: _SumGradients.apply(one, group)):
                return forward(*args, **kwargs)

        module.forward = with_sums
        return module


class _LatestInput:
    """Latest input of matrices that are split by their results, in the forms in which its gradient is summed."""

    def __init__(self) -> None:
        self._input: Tensor | None = None
        self._forms: dict[str, Any] = {}

    def form(self, name: str, given: Tensor, make: Callable[[], Any]) -> Any:
        """Return an input in the named form, the same one for all matrices of a block."""
        if given is not self._input:
            self._input, self._forms = given, {}
        if name not in self._forms:
            self._forms[name] = make()
        return self._forms[name]

    def forget(self) -> None:
        self._input, self._forms = None, {}


class _JoinedColumns(ColwiseParallel):
    """Matrices split by their results, of which those of one input share the sum of its gradient over processes.

    Transformers has one for each: three for queries, keys and values, where Shoeybi et al. have one.
    """

    def transform_inputs_pre_forward(self, module: Any, args: Any, kwargs: Any, mesh: DeviceMesh) -> Any:
        prepare = partial(super().transform_inputs_pre_forward, module, args, kwargs, mesh)
        if not torch.is_grad_enabled():
            return prepare()
        return (_latest.form("spread", args[0], lambda: prepare()[0][0]), *args[1:]), kwargs


class _LastRows(RowwiseParallel):
    """Matrices split by their inputs, which end a block: the block's own input is not kept any longer."""

    def transform_inputs_pre_forward(self, module: Any, args: Any, kwargs: Any, mesh: DeviceMesh) -> Any:
        _latest.forget()
        return super().transform_inputs_pre_forward(module, args, kwargs, mesh)


_latest = _LatestInput()
OWN_STYLES = {
    "vocabulary": _SplitVocabulary(),
    "replicated_with_grad_allreduce": _SummedGradients(),
    "colwise": _JoinedColumns(),
    "rowwise": _LastRows(),
}
for _name, _style in OWN_STYLES.items():
    ALL_PARALLEL_STYLES.register(_name, _style)


@contextmanager
def changed(module: nn.Module, change: Any) -> Iterator[None]:
    """Let a module compute with a function of its parameters."""
    own = dict(module._parameters)
    module._parameters.update({name: change(one) for name, one in own.items() if one is not None})
    try:
        yield
    finally:
        module._parameters.update(own)
        for name in own.keys() & module._buffers.keys():  # PEFT's way to restore what it has replaced
            del module._buffers[name]


def split_matrices(causal_lm: Any, mesh: DeviceMesh) -> None:
    """Split a model's weights over the processes of `mesh`, in place: parameters become DTensors on it.

    Raises ModelError for a model without a plan.
    """
    plan = _plan_of_text(causal_lm)
    if not plan:
        raise ModelError(
            f"{type(causal_lm).__name__} has no plan of tensor parallelism in Transformers; set `tp: 1`, and split it "
            "over more processes by `dp_shard`"
        )
    names = {module: name for name, module in causal_lm.named_modules()}
    ends = {names[causal_lm.get_input_embeddings()]: "vocabulary", names[causal_lm.get_output_embeddings()]: GATHERED}
    ties = causal_lm.get_input_embeddings().weight is causal_lm.get_output_embeddings().weight
    causal_lm.tp_plan = {**plan, **ends}
    _split_by_plan(causal_lm, mesh)
    if ties:
        causal_lm.get_output_embeddings().weight = causal_lm.get_input_embeddings().weight


def style_of(weight: str, plan: dict[str, str]) -> str | None:
    """Return the style of a plan for a weight: its own, or its module's."""
    name = generic(weight)
    return plan.get(name, plan.get(name.rpartition(".")[0]))


def generic(name: str) -> str:
    """Return the name of a module or weight as plans have it, with a wildcard for its layer's number."""
    return str(replace_layer_number_by_wildcard(name))


def _split_by_plan(causal_lm: Any, mesh: DeviceMesh) -> None:
    """Split weights and change forward passes as a model's plan says; Transformers' function differs by version."""
    plan = causal_lm.tp_plan
    for name, module in causal_lm.named_modules():
        for weight, _ in [*module.named_parameters(recurse=False)]:
            if own := style_of(f"{name}.{weight}", plan):
                style = ALL_PARALLEL_STYLES[own]
                style.validate_param(module, weight, mesh, parameter_name=f"{name}.{weight}")
                style.shard_param(module, weight, mesh)
        if of_module := plan.get(generic(name)):
            if of_module.startswith("mla_kv_a_proj"):  # also around an adapter
                module.config = causal_lm.config.get_text_config()  # this style asks it for the width of its parts
            ALL_PARALLEL_STYLES[of_module].install_forward(module, mesh)


def _plan_of_text(causal_lm: Any) -> dict[str, str]:
    """Return the styles of a model's plan for modules and weights of its text layers: each process has towers whole."""
    names = {module: name for name, module in causal_lm.named_modules()}
    known = set()
    for layer in text_layers(causal_lm):
        inner = [*layer.named_modules(remove_duplicate=False), *layer.named_parameters(remove_duplicate=False)]
        known |= {generic(f"{names[layer]}.{name}") for name, _ in inner}
    return {name: style for name, style in causal_lm.tp_plan.items() if name in known}


def matrices_left_whole(causal_lm: Any) -> list[str]:
    """Return the matrices of text layers that each process has whole, without the numbers of layers.

    A plan may lack a part, such as DeepSeek-V3's attention. Factors of adapters count with the matrix that they adapt.
    """
    whole = set()
    for layer in text_layers(causal_lm):
        for name, weight in layer.named_parameters():
            if weight.ndim > 1 and "lora_" not in name and not is_split(weight):
                whole.add(name)
    return sorted(whole)


def block_input(states: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return the input of a block, of which the gradients by a process's parts of its matrices are summed once."""
    summed_once: Tensor = _latest.form("summed", states, lambda: _SumGradients.apply(states, group))
    return summed_once


def end_block() -> None:
    """Forget the input of a block, whose last matrix is computed."""
    _latest.forget()


def summed_gradients(hidden: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return hidden states whose gradients, each by a process's entries of the vocabulary, are summed."""
    return _SumGradients.apply(hidden, group)


def summed(values: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return the sum of values over processes, each of which gets its gradient whole."""
    return _Sum.apply(values, group)


def is_split(tensor: Tensor, dimension: str = "tp") -> bool:
    """Return whether each process along a dimension of the mesh has a part of a tensor of its own."""
    if not isinstance(tensor, DTensor):
        return False
    named = dict(zip(tensor.device_mesh.mesh_dim_names or (), tensor.placements, strict=True))
    return dimension in named and not named[dimension].is_replicate()
