"""LoRA on matrices that tensor parallelism splits: each process computes its part of the product and of the adapter.

Of x Wᵀ + scaling · (x Aᵀ) Bᵀ a process with rows of W has the same rows of B, and all of A; one with columns of W has
the same columns of A, and all of B. What it computes is its part of the layer's output either way: columns of it, or a
summand. The factor that all have gets a gradient by each one's part, and these are summed.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from transformers.distributed.tensor_parallel import (
    ALL_PARALLEL_STYLES,
    TensorParallelLayer,
)

from stages.adapters.files import INNER
from stages.engines.fsdp.tensor_parallel import (
    block_input,
    changed,
    end_block,
    generic,
    is_split,
    style_of,
    summed,
    summed_gradients,
)
from stages.engines.fsdp.token_parallel import FORM

ROWS = ("colwise", "packed_colwise", FORM["colwise"])
COLUMNS = ("rowwise", "packed_rowwise", FORM["rowwise"])
"""Styles that split the last dimension but one of a weight, and the last; a factor with that dimension has the same."""
WHOLE = ("colwise_gather_output", "colwise_rep", "rowwise_split_input", "rowwise_rep")
"""Styles of layers whose input and output each process has whole: those with an adapter stay whole themselves."""


def plan_adapters(causal_lm: Any) -> None:
    """Extend a model's plan by its LoRA layers, whose weights have other names in it, and by their factors."""
    plan, extended = causal_lm.tp_plan, dict(causal_lm.tp_plan)
    for name, module in causal_lm.named_modules():
        if not hasattr(module, "lora_A"):
            continue
        wrapped = name.replace(INNER, "")
        if own := plan.get(generic(wrapped)):
            extended[generic(wrapped)] = style = f"{own}_around_adapter"
            ALL_PARALLEL_STYLES.register(style, _AroundAdapter(own))
        held = [f"{INNER}.{one}" for one, _ in module.base_layer.named_parameters(recurse=False)]
        of_held = {one: style_of(f"{wrapped}{one.removeprefix(INNER)}", plan) for one in held}
        parameter = getattr(module, "parameter_name", "weight")  # of experts: one of several that a module has
        of_factors = _styles_of_factors(module, style_of(f"{wrapped}.{parameter}", plan))
        for one, of_one in {**of_held, **of_factors}.items():
            if of_one and of_one in ROWS + COLUMNS:
                extended[generic(f"{name}{one}")] = of_one
    causal_lm.tp_plan = extended


def _styles_of_factors(module: Any, style: str | None) -> dict[str, str]:
    """Return the styles of A, B and DoRA's lengths of rows on a weight with this style, by the end of their names."""
    # A weight is [out, in]; of experts some have [in, out], and PEFT says so by not exchanging the two.
    is_transposed = not getattr(module, "_did_swap_in_out_features", True)
    if style not in ROWS + COLUMNS:
        return {}
    if (style in ROWS) is is_transposed:
        return {".lora_A.default.weight": "rowwise"}
    if style.startswith("packed"):
        # Whole, and cut in use: FSDP2 would shard rows that are in turns, and torch puts these together wrongly.
        module.lora_B.default.is_cut = True
        return {}
    return {".lora_B.default.weight": "colwise", ".lora_magnitude_vector.default.weight": "colwise"}


class _AroundAdapter(TensorParallelLayer):
    """Style of a plan for layers of which some, or all, have an adapter."""

    def __init__(self, name: str) -> None:
        self._name, self._style = name, ALL_PARALLEL_STYLES[name]

    def validate_param(self, module: Any, param: str, mesh: DeviceMesh, parameter_name: str | None = None) -> None:
        self._style.validate_param(module, param, mesh, parameter_name=parameter_name)

    def shard_param(self, module: Any, param: str, mesh: DeviceMesh) -> None:
        self._style.shard_param(module, param, mesh)

    def install_forward(self, module: Any, mesh: DeviceMesh) -> Any:
        if not hasattr(module, "lora_A"):
            return self._style.install_forward(module, mesh)
        if self._name in WHOLE:
            return module
        group, compute = mesh.get_group(), module.forward
        with_own_parts = partial(_with_own_parts, module, compute, group)
        if self._name in ROWS:
            local_input = getattr(self._style, "local_input", block_input)
            module.forward = partial(_with_local_input, with_own_parts, local_input, group)
        elif self._name in COLUMNS:
            for length in getattr(module, "lora_magnitude_vector", {}).values():
                length.get_weight_norm = partial(_norm_of_all_columns, length.get_weight_norm, group)
            add_up = getattr(self._style, "add_up", _added_up)
            module.forward = partial(_summed_with_bias, module, with_own_parts, add_up, group)
        else:  # experts, whose inputs and outputs the plan sums around them, or layers that each process has whole
            module.forward = with_own_parts
            self._style.install_forward(module, mesh)
        return module


@contextmanager
def _own_parts(module: nn.Module, group: dist.ProcessGroup) -> Iterator[None]:
    """Let a LoRA layer compute with this process's parts of its weights; gradients of whole ones are summed."""

    def own(parameter: Tensor, is_cut: bool) -> Tensor:
        if isinstance(parameter, DTensor):
            if parameter.requires_grad:
                return parameter.to_local()
            with torch.no_grad():  # a parameter, since PEFT's adapters of experts replace parameters alone
                return nn.Parameter(parameter.to_local(), requires_grad=False)
        whole = summed_gradients(parameter, group) if parameter.requires_grad else parameter
        return whole.unflatten(0, (2, group.size(), -1))[:, group.rank()].flatten(0, 1) if is_cut else whole

    with ExitStack() as stack:
        # Asked here: plans install what surrounds a module before they split its weights.
        for one in module.modules() if any(map(is_split, module.parameters())) else ():
            stack.enter_context(changed(one, partial(own, is_cut=getattr(one, "is_cut", False))))
        yield


def _with_own_parts(
    module: nn.Module, compute: Callable[..., Tensor], group: dist.ProcessGroup, *args: Any, **options: Any
) -> Tensor:
    with _own_parts(module, group):
        return compute(*args, **options)


def _with_local_input(
    compute: Callable[..., Tensor],
    local_input: Callable[[Tensor, dist.ProcessGroup], Tensor],
    group: dist.ProcessGroup,
    states: Tensor,
    *args: Any,
    **options: Any,
) -> Tensor:
    return compute(local_input(states, group), *args, **options)


def _summed_with_bias(
    module: Any,
    compute: Callable[..., Tensor],
    add_up: Callable[[Tensor, Tensor | None, dist.ProcessGroup], Tensor],
    group: dist.ProcessGroup,
    *args: Any,
    **options: Any,
) -> Tensor:
    """Return the sum of what each process computes of a layer's output, and the layer's bias, once."""
    end_block()
    base = module.base_layer
    bias = base._parameters["bias"]
    base._parameters["bias"] = None
    try:
        own = compute(*args, **options)
    finally:
        base._parameters["bias"] = bias
    return add_up(own, bias.to_local() if isinstance(bias, DTensor) else bias, group)


def _added_up(own: Tensor, bias: Tensor | None, group: dist.ProcessGroup) -> Tensor:
    output = summed(own, group)
    return output if bias is None else output + bias


@torch.no_grad()
def _norm_of_all_columns(norm: Callable[..., Tensor], group: dist.ProcessGroup, *args: Any, **options: Any) -> Tensor:
    """Return the lengths of a weight's rows, of which each process has some columns, [out]; PEFT takes no gradient."""
    squared = norm(*args, **options).square()
    dist.all_reduce(squared, group=group)
    return squared.sqrt()
