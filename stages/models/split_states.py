"""States of a walk that a plan of tensor parallelism splits, and what of the model's code the plan does not fit.

A plan names modules. Between a matrix that it splits by results and the next one, by inputs, each process has a part of
the states. Code may do there only what can be done with a part: a sum along what is split is by this part alone, and so
is the gradient of a weight that the plan leaves whole and does not name.
"""

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from stages.models.layer_kinds import STYLES, PlannedSplit


@dataclass(frozen=True)
class PlannedWeight:
    """Weight of a model, and what a plan of tensor parallelism does with it."""

    name: str
    split: PlannedSplit | None = None
    """Split of the weight; None: it is whole on each process, or the embedding's, of which each has some rows."""
    is_named: bool = False
    """True if the plan names the weight, so that gradients of a whole one are summed over processes."""
    is_embedding: bool = False


def planned_weights(model: Any) -> Iterator[tuple[nn.Parameter, PlannedWeight]]:
    """Yield each parameter with what Transformers' plan of tensor parallelism, if there is one, does with it."""
    plan = model.tp_plan if model.config.get_text_config().base_model_tp_plan else {}
    embedding = model.get_input_embeddings().weight
    for name, parameter in model.named_parameters():
        pattern = re.sub(r"\.\d+\.", ".*.", name)
        style = plan.get(pattern, plan.get(pattern.rpartition(".")[0], ""))
        split = next((split for end, split in STYLES.items() if end in style), None)
        yield parameter, PlannedWeight(name, split, bool(style), parameter is embedding)


class SplitStates:
    """Storages of states of which each process has a part, followed through the operations of a forward pass."""

    def __init__(self, weights: Mapping[int, PlannedWeight], constants: set[int]) -> None:
        """Follow states from now on. weights: by their storages; constants: storages of buffers."""
        self.flaw = ""
        """First reason, as a clause, why the split model computes something else; empty: none."""
        self._weights, self._constants = weights, constants
        self._widths: dict[int, int] = {}
        """Width of the whole matrix that split states come from, by their storage."""
        self._of_whole = {number: one.name for number, one in weights.items() if one.split is None and not one.is_named}
        """Names of whole weights, by their storages, and by those of what is made of weights alone."""
        self._alive: list[Any] = []
        """Storages that were met: a new one would get the number of one that is gone."""

    def __contains__(self, number: int) -> bool:
        return number in self._widths

    def follow(self, func: Any, given: Iterable[Any], results: Iterable[Any]) -> bool | None:
        """Note which results of an operation are split; return whether its weights end in a sum, None without any."""
        tensors = {_number(one): one for one in given if isinstance(one, Tensor)}
        weights = {number: self._weights[number] for number in tensors.keys() & self._weights.keys()}
        styles = {one.split for one in weights.values()}
        widths = [self._widths[number] for number in tensors if number in self._widths]
        made = [one for one in results if isinstance(one, Tensor) and _number(one) not in self._weights]
        whole = [self._of_whole[number] for number in tensors if number in self._of_whole]
        if any(one.is_embedding for one in weights.values()) and func is not torch.ops.aten.embedding.default:
            self._note("code beside the embedding reads its weights, of which each process has some rows")
        if "columns" in styles and made:
            widths.append(made[0].shape[-1])
        if widths and styles <= {"columns", None}:
            self._look(tensors, made, whole)
            self._widths |= {self._kept(one): max(widths) for one in made}
        elif whole and tensors.keys() <= self._of_whole.keys() | self._constants:
            self._of_whole |= {self._kept(one): whole[0] for one in made}
        return bool(styles & {"rows", "cut rows"}) if weights else None

    def leave(self, results: Iterable[Any], layer: str) -> None:
        """Look at what a layer gives to the next one, which must be whole."""
        if any(_number(one) in self._widths for one in results if isinstance(one, Tensor)):
            self._note(f"{layer} gives parts of states to the next layer")

    def _look(self, given: Mapping[int, Tensor], made: list[Tensor], whole: list[str]) -> None:
        """Note what goes wrong in an operation on states that are split."""
        parts = [(one, self._widths[number]) for number, one in given.items() if number in self._widths]
        if parts and whole:
            self._note(f"gradients of {whole[0]} are not summed")
        # Norms of heads are sums as well, but over less than all that is split; views of some states are none.
        new = [one for one in made if _number(one) not in given]
        if any(one.numel() <= part.numel() // width for one in new for part, width in parts):
            self._note("code sums over states of which each process has a part")

    def _note(self, flaw: str) -> None:
        self.flaw = self.flaw or flaw

    def _kept(self, tensor: Tensor) -> int:
        self._alive.append(tensor.untyped_storage())
        return _number(tensor)


def _number(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)
