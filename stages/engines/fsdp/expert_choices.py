"""Choices of experts by the routers of a mixture model: recorded in one forward pass, and replayed in later ones.

The old policy of GRPO chooses other experts than the one that learns, and a token's probability jumps where a choice
changes, however small the update. With the old choices replayed (Zheng et al. 2025, GSPO, section 5.3: Routing Replay)
routers still learn, by the weights that they give to these experts.

A choice is the `topk` within a mixture layer whose indices its experts receive, whatever the router is called and
computes before and after.
"""

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from stages.adapters.files import INNER
from stages.core.errors import ModelError

NUM_ARGUMENTS = 4
"""Number of parameters of the forward pass of experts that receive choices: itself, states, choices and weights."""


class ExpertChoices:
    """Choices of a model's mixture layers; it changes their forward passes, before the model is sharded.

    replayed: choices to replay in forward passes and when layers are recomputed, int [layers, tokens, k]; None: routers
    choose.
    """

    def __init__(self, causal_lm: nn.Module) -> None:
        """Raises ModelError for a model without experts that receive choices."""
        self.replayed: Tensor | None = None
        self._recorded: dict[int, Tensor] | None = None
        self._places: dict[int, int] = {}
        """Which of the `topk` within a layer is the choice, counted from 0, by layer."""
        experts = {name: one for name, one in causal_lm.named_modules() if is_stack(one) and receives_choices(one)}
        if not experts:
            raise ModelError(
                f"{type(causal_lm).__name__} has no experts that receive a router's choices, and `replay_experts` "
                "replays these; remove it"
            )
        for layer, (name, module) in enumerate(experts.items()):
            around: Any = causal_lm.get_submodule(name.replace(INNER, "").rpartition(".")[0])  # also around an adapter
            calls = _Choice(self, layer, name)
            module.register_forward_pre_hook(calls.received)
            around.forward = partial(calls.forward, around.forward)

    @contextmanager
    def recording(self) -> Iterator[Callable[[], Tensor]]:
        """Record the choices of a forward pass; the yielded function returns them, int32 [layers, tokens, k].

        Tokens are in the order in which this process computes them.
        """
        self.replayed, self._recorded = None, {}
        try:
            recorded = self._recorded
            yield lambda: torch.stack([recorded[layer] for layer in sorted(recorded)]).int()
        finally:
            self._recorded = None

    @property
    def are_recorded(self) -> bool:
        """True while a forward pass is recorded."""
        return self._recorded is not None

    def place(self, layer: int) -> int:
        """Return which `topk` of a layer is the choice, counted from 0, once it was recorded."""
        return self._places[layer]

    def record(self, layer: int, place: int, indices: Tensor) -> None:
        assert self._recorded is not None
        self._places[layer], self._recorded[layer] = place, indices.flatten(0, -2)


class _Choice(TorchFunctionMode):
    """One mixture layer's choices, found among the `topk` of its forward pass."""

    def __init__(self, choices: ExpertChoices, layer: int, name: str) -> None:
        super().__init__()
        self._choices, self._layer, self._name = choices, layer, name
        self._chosen: list[Tensor] = []

    def forward(self, compute: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
        """Return what the layer computes, with the replayed choices if there are any."""
        if not self._choices.are_recorded and self._choices.replayed is None:
            return compute(*arguments, **named)
        self._chosen = []
        with self:
            return compute(*arguments, **named)

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        if function not in (torch.topk, Tensor.topk):
            return result
        replayed = self._choices.replayed
        if replayed is not None and self._choices.place(self._layer) == len(self._chosen):
            indices = replayed[self._layer].to(result.indices).view_as(result.indices)
            result = type(result)((args[0].gather(-1, indices), indices))
        self._chosen.append(result.indices)
        return result

    def received(self, module: nn.Module, arguments: tuple[Any, ...]) -> None:
        """Note which `topk` gave the choices that the experts receive. Raises ModelError if none did."""
        if not self._choices.are_recorded:
            return
        # The last: what scores groups of experts by their best ones may choose equally before it.
        places = [place for place, one in enumerate(self._chosen) if _equal(one, arguments[1])]
        if not places:
            raise ModelError(
                f"the experts {self._name} receive choices that no `topk` within their layer made, so that "
                "`replay_experts` cannot replay them; remove it"
            )
        self._choices.record(self._layer, places[-1], arguments[1])


def is_stack(module: nn.Module) -> bool:
    """Return whether a module has a layer's experts, each weight as one stack of them."""
    stacks = list(module.parameters(recurse=False))
    number = getattr(module, "num_experts", None)
    # A router's weight is one matrix; stacks of matrices may have biases beside.
    return any(one.ndim == 3 for one in stacks) and all(len(one) == number for one in stacks)


def receives_choices(module: nn.Module) -> bool:
    """Return whether experts compute the tokens that chose them, and not all tokens."""
    return len(inspect.signature(type(module).forward).parameters) == NUM_ARGUMENTS


def _equal(one: Tensor, other: Tensor) -> bool:
    return one is other or (one.numel() == other.numel() and torch.equal(one.flatten(), other.flatten().to(one)))
