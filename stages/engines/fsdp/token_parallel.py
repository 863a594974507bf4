"""Sequence parallelism of layers that are split over `tp` (Korthikanti et al. 2022, section 4.2.2).

Between blocks each process has some tokens, of all rows, and computes norms and residuals of these alone. A block's
input is gathered, and what its last matrix gives is summed and scattered: together as many bytes as the sum that tensor
parallelism makes there. First matrices keep this process's tokens of their input; all are gathered again for the
gradients of their weights.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from inspect import signature
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.nn.functional import linear, pad
from transformers.distributed.tensor_parallel import (
    ALL_PARALLEL_STYLES,
    ColwiseParallel,
    RowwiseParallel,
    TensorParallelLayer,
)

from stages.adapters.files import INNER
from stages.core.errors import ModelError
from stages.engines.fsdp.tensor_parallel import changed, generic, style_of, summed_gradients
from stages.models.layers import text_layers

SUMMED = "replicated_with_grad_allreduce"
"""Style of whole weights, each process's gradient of which is by its own tokens or heads."""
FORM = {"colwise": "columns of tokens", "rowwise": "rows to tokens", SUMMED: SUMMED}
"""Styles of a plan that tokens can be split around, with those that do so."""

# The latter are their names before torch 2.13.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


@dataclass(frozen=True)
class _Tokens:
    """Tokens of rows, of which each process has equally many; the last may be padding."""

    group: dist.ProcessGroup
    shape: torch.Size
    """Rows and tokens of each: those of the latest batch."""

    @property
    def _num_own(self) -> int:
        return -(-self.shape.numel() // self.group.size())

    def _padded(self, states: Tensor) -> Tensor:
        return pad(states.flatten(0, 1), (0, 0, 0, self._num_own * self.group.size() - self.shape.numel()))

    def own(self, states: Tensor) -> Tensor:
        """Return this process's tokens, [1, tokens, width], of [rows, sequence, width]."""
        own = self._padded(states).unflatten(0, (-1, self._num_own))[self.group.rank()]
        return own.unsqueeze(0).clone()  # a view would keep the states of all tokens

    def summed(self, states: Tensor) -> Tensor:
        """Return this process's tokens, [1, tokens, width], of the sum over processes of [rows, sequence, width]."""
        padded = self._padded(states).contiguous()
        own = padded.new_empty(1, self._num_own, padded.shape[1])
        _reduce_scatter(own[0], padded, group=self.group)
        return own

    def all(self, states: Tensor) -> Tensor:
        """Return the tokens of all processes, [rows, sequence, width], of [1, tokens, width]."""
        own, num_all = states.squeeze(0).contiguous(), self._num_own * self.group.size()
        # FSDP2 warns of layers that return a view, so that only padding is cut off by one.
        is_padded = num_all != self.shape.numel()
        everyones = own.new_empty(num_all, own.shape[1]) if is_padded else own.new_empty(*self.shape, own.shape[1])
        _all_gather(everyones.view(num_all, -1), own, group=self.group)
        return everyones[: self.shape.numel()].unflatten(0, self.shape).clone() if is_padded else everyones


class _Exchange(torch.autograd.Function):
    """Function of tokens, whose gradient is another function's of the gradient."""

    @staticmethod
    def forward(
        ctx: Any, states: Tensor, there: Callable[[Tensor], Tensor], back: Callable[[Tensor], Tensor]
    ) -> Tensor:
        ctx.back = back
        return there(states)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        return ctx.back(gradients[0]), None, None


class _BlockInput:
    """Input of a block: this process's tokens, gathered; and again for the backward passes of its first matrices."""

    def __init__(self, own: Tensor, tokens: _Tokens) -> None:
        self.own, self._tokens = own, tokens
        self._again: Tensor | None = None
        self.all: Tensor = _Exchange.apply(own, tokens.all, self._left)

    def again(self, own: Tensor) -> Tensor:
        """Return all tokens in a backward pass."""
        if self._again is None:
            self._again = self._tokens.all(own)
        return self._again

    def forget(self) -> None:
        """Let go of the states, since the graph of the backward pass keeps this object."""
        del self.own, self.all

    def _left(self, gradient: Tensor) -> Tensor:
        self._again = None
        return self._tokens.summed(gradient)


class _Product(torch.autograd.Function):
    """Product of a block's input with a matrix, which keeps this process's tokens alone."""

    @staticmethod
    def forward(
        ctx: Any, states: Tensor, own: Tensor, weight: Tensor, bias: Tensor | None, again: Callable[[Tensor], Tensor]
    ) -> Tensor:
        ctx.again = again
        ctx.save_for_backward(own if ctx.needs_input_grad[2] else None, weight)
        return linear(states, weight, bias)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (gradient,), (own, weight) = gradients, ctx.saved_tensors
        of_states = gradient @ weight if ctx.needs_input_grad[0] else None
        of_weight = None
        if own is not None:
            of_weight = gradient.flatten(0, 1).T @ ctx.again(own).flatten(0, 1)
        of_bias = gradient.sum((0, 1)) if ctx.needs_input_grad[3] else None
        return of_states, None, of_weight, of_bias, None


class _Now:
    """Tokens of the latest batch, and the block that they are in, of this process.

    Recomputed layers ask, too: a backward pass must follow its forward pass before another batch's.
    """

    tokens: _Tokens
    block: _BlockInput | None = None


_now = _Now()


class _Block(TensorParallelLayer):
    """Attention or feed-forward block, which gets all tokens for those of this process."""

    def install_forward(self, module: Any, mesh: DeviceMesh) -> Any:
        forward, name = module.forward, next(iter(signature(module.forward).parameters))

        def with_all(*args: Any, **kwargs: Any) -> Any:
            own = args[0] if args else kwargs.pop(name)
            _now.block = _BlockInput(own, _now.tokens)
            try:
                return forward(_now.block.all, *args[1:], **kwargs)
            finally:
                _now.block.forget()
                _now.block = None

        module.forward = with_all
        return module


class _ColumnsOfTokens(ColwiseParallel):
    """Matrix that is split by its results: the gradient of its input is this process's summand of it."""

    def local_input(self, states: Tensor, group: dist.ProcessGroup) -> Tensor:
        return states

    def install_forward(self, module: Any, mesh: DeviceMesh) -> Any:
        forward = module.forward

        def with_own(states: Tensor) -> Tensor:
            block = _now.block
            with changed(module, DTensor.to_local):
                if block is None or states is not block.all:  # something lies between
                    return forward(states)
                return _Product.apply(states, block.own.detach(), module.weight, module.bias, block.again)

        module.forward = with_own
        return module


class _RowsToTokens(RowwiseParallel):
    """Matrix that is split by its inputs, and ends a block: each process gets the sums of its tokens."""

    def add_up(self, own: Tensor, bias: Tensor | None, group: dist.ProcessGroup) -> Tensor:
        tokens = _now.tokens
        summed: Tensor = _Exchange.apply(own, tokens.summed, tokens.all)
        return summed if bias is None else summed + summed_gradients(bias, group)

    def install_forward(self, module: Any, mesh: DeviceMesh) -> Any:
        group = mesh.get_group()

        def to_tokens(states: Tensor) -> Tensor:
            # In the module's table, by which `recompute: offload` knows gathered weights from activations.
            with changed(module, DTensor.to_local):
                own, bias = linear(states, module.weight), module.bias
            return self.add_up(own, bias, group)

        module.forward = to_tokens
        return module


BLOCK = "block of tokens"
ALL_PARALLEL_STYLES.register(BLOCK, _Block())
ALL_PARALLEL_STYLES.register(FORM["colwise"], _ColumnsOfTokens())
ALL_PARALLEL_STYLES.register(FORM["rowwise"], _RowsToTokens())


def split_tokens(causal_lm: Any, group: dist.ProcessGroup) -> None:
    """Change a model's plan, and its first and last layer, so that tokens are split between the blocks of its layers.

    Before adapters are planned. Raises ModelError for a layer that is made of other things than norms, and blocks of
    matrices split by their results, then by their inputs.
    """
    names = {module: name for name, module in causal_lm.named_modules()}
    plan, layers = causal_lm.tp_plan, text_layers(causal_lm)
    around: dict[str, str] = {}
    for layer in layers:
        if [*layer.parameters(recurse=False)]:
            raise _other_form(causal_lm, names[layer], "has weights of its own")
        for child in layer.children():
            prefix = names[child]
            weights = {name: one for name, one in child.named_parameters(prefix) if "lora_" not in name}
            styles = {style_of(name.replace(INNER, ""), plan) for name in weights}
            if {"colwise", "rowwise"} <= styles <= FORM.keys():
                around[generic(prefix)] = BLOCK
            elif styles <= {None} and all(one.ndim == 1 for one in weights.values()):
                around |= {generic(name.rpartition(".")[0]): SUMMED for name in weights}
            else:
                raise _other_form(causal_lm, prefix, "is no norm, and no block of columns, then rows, in its plan")
    causal_lm.tp_plan = {name: FORM.get(style, style) for name, style in plan.items()} | around
    layers[0].forward = partial(_from_all, layers[0].forward, group)
    layers[-1].forward = partial(_to_all, layers[-1].forward)


def _from_all(forward: Callable[..., Any], group: dist.ProcessGroup, states: Tensor, *args: Any, **options: Any) -> Any:
    _now.tokens = tokens = _Tokens(group, states.shape[:2])
    return forward(_Exchange.apply(states, tokens.own, tokens.all), *args, **options)


def _to_all(forward: Callable[..., Any], states: Tensor, *args: Any, **options: Any) -> Any:
    own, tokens = forward(states, *args, **options), _now.tokens
    if isinstance(own, tuple):
        return _Exchange.apply(own[0], tokens.all, tokens.own), *own[1:]
    return _Exchange.apply(own, tokens.all, tokens.own)


def _other_form(causal_lm: Any, name: str, why: str) -> ModelError:
    return ModelError(
        f"layout: sequence_parallel splits tokens between norms and blocks, but {name} of {type(causal_lm).__name__} "
        f"{why}; set `sequence_parallel: false`"
    )
