"""Search for layers that AWQ and SmoothQuant may scale against each other without changing a model's results.

Both divide the outputs of one layer, channel by channel, by the factors with which they multiply the weights after it:
a norm and the layers that read it, or the last product before another. Which these are differs by architecture
(post-norms feed no layer, some norms add 1 to their weights, a router reads beside the experts), and tables of names
silently lack some. So the model is run on a few tokens to see what reads what, and each pair is tried with powers of
two, exact in floating point: the module around a pair gives the same numbers if and only if it may be scaled.
"""

from collections import defaultdict
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from torch.utils.hooks import RemovableHandle

PROBE_TOKENS = 8
POWERS_OF_TWO = torch.tensor([0.5, 1.0, 2.0, 4.0, 0.25])
"""Factors by which layers are scaled to test whether results stay the same.

The period divides no size of a head: each channel of a head has another factor than the same one of the next head."""


@dataclass(frozen=True)
class Scaling:
    """Source layer and the layers that read its output, which AWQ or SmoothQuant may scale against each other.

    All are module names. source: a norm, or a linear layer whose last outputs are read. readers: all that reads them.
    scope: a module that holds both and was called. of_norm: whether the source is a norm.
    """

    source: str
    readers: tuple[str, ...]
    scope: str
    of_norm: bool


@dataclass
class _Calls:
    """Record of one forward pass: modules' arguments and outputs by name; kept, so that addresses identify them."""

    arguments: dict[str, tuple[tuple[Any, ...], dict[str, Any]]] = field(default_factory=dict)
    outputs: dict[str, Tensor] = field(default_factory=dict)
    order: list[str] = field(default_factory=list)


def find_scalings(model: nn.Module, tokens: Tensor, quantized: set[str]) -> list[Scaling]:
    """Return the pairs of layers between which AWQ or SmoothQuant may move a scale factor for each channel.

    Each has a `quantized` reader (module names); each set of readers is in one pair, with a norm if possible. tokens:
    int64 [1, tokens], of which a few are used.
    """
    calls = _watch(model, tokens[:1, :PROBE_TOKENS])
    found: dict[tuple[str, ...], Scaling] = {}
    for scaling in (*_after_norms(model, calls, quantized), *_after_layers(model, calls, quantized)):
        if scaling.readers not in found and _is_exact(model, [scaling], scaling.scope, calls):
            found[scaling.readers] = scaling
    scalings = list(found.values())
    # "" is the whole model, here with all pairs scaled at once.
    if _is_exact(model, scalings, "", calls):
        return scalings
    # Another module outside a scope reads a source too, such as a later layer that shares keys and values.
    return [scaling for scaling in scalings if _is_exact(model, [scaling], "", calls)]


@torch.no_grad()
def _watch(model: nn.Module, tokens: Tensor) -> _Calls:
    calls, handles = _Calls(), list[RemovableHandle]()

    def keep(name: str, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        calls.arguments[name] = (args, kwargs)
        calls.order.append(name)
        if isinstance(output, Tensor):
            calls.outputs[name] = output

    for name, module in model.named_modules():
        hook = lambda _, args, kwargs, output, name=name: keep(name, args, kwargs, output)  # noqa: E731
        handles.append(module.register_forward_hook(hook, with_kwargs=True))
    model(input_ids=tokens, attention_mask=torch.ones_like(tokens), use_cache=False)
    for handle in handles:
        handle.remove()
    return calls


def _after_norms(model: nn.Module, calls: _Calls, quantized: set[str]) -> Iterator[Scaling]:
    """Yield each norm with the linear layers that read its output, as candidates for AWQ or SmoothQuant to scale."""
    modules, readers = dict(model.named_modules()), defaultdict[int, list[str]](list)
    for name in calls.order:
        if (given := _input_of(calls, name)) is not None and _dims(modules[name]) == 2:
            readers[given.data_ptr()].append(name)  # under the address of its input, which is that of an output
    for name in calls.order:
        if _dims(modules[name]) != 1 or name not in calls.outputs:
            continue
        reading = tuple(readers[calls.outputs[name].data_ptr()])
        widths = {modules[reader].weight.shape[1] for reader in reading}
        if quantized & set(reading) and widths == {len(modules[name].weight)}:
            yield Scaling(name, reading, _scope(calls, (name, *reading)), of_norm=True)


def _after_layers(model: nn.Module, calls: _Calls, quantized: set[str]) -> Iterator[Scaling]:
    """Yield pairs of linear layers in a module, the second with the first's last outputs as inputs, to scale."""
    modules = dict(model.named_modules())
    siblings = defaultdict[str, list[str]](list)
    for name in calls.order:
        module = modules[name]
        if not isinstance(module, nn.Linear):
            continue
        parent = name.rpartition(".")[0]
        # The nearest first: of several sources for one reader, `find_scalings` takes the first that is exact.
        for source in reversed(siblings[parent]) if name in quantized else ():
            outputs, bias = modules[source].weight.shape[0], modules[source].bias
            if outputs == module.in_features or (outputs > module.in_features and bias is None):
                yield Scaling(source, (name,), _scope(calls, (source, name)), of_norm=False)
        siblings[parent].append(name)


@torch.no_grad()
def _is_exact(model: nn.Module, scalings: list[Scaling], scope: str, calls: _Calls) -> bool:
    """Return whether a module computes exactly the same numbers after its layers are scaled by powers of two."""
    module = model.get_submodule(scope)
    args, kwargs = calls.arguments[scope]
    before = _tensors(module(*args, **kwargs))
    with ExitStack() as stack:
        for scaling in scalings:
            stack.enter_context(_scaled(model, scaling))
        after = _tensors(module(*args, **kwargs))
    return all(map(torch.equal, before, after))


@contextmanager
def _scaled(model: nn.Module, scaling: Scaling) -> Iterator[None]:
    source = model.get_submodule(scaling.source)
    readers = [model.get_submodule(name) for name in scaling.readers]
    num_channels = readers[0].weight.shape[1]
    scales = POWERS_OF_TWO.repeat(-(-num_channels // len(POWERS_OF_TWO)))[:num_channels].to(readers[0].weight)
    # Multiplied back rather than kept: a copy of every layer would be a second model. fp16 is too narrow for that.
    narrow = [(tensor, tensor.clone()) for tensor in _parameters(source, *readers) if tensor.dtype == torch.float16]
    try:
        for tensor in _parameters(source):
            tensor[-num_channels:].div_(scales if tensor.ndim == 1 else scales.unsqueeze(1))
        for reader in readers:
            reader.weight.mul_(scales)  # [outputs, channels]: one factor for each input
        yield
    finally:
        for tensor in _parameters(source):
            tensor[-num_channels:].mul_(scales if tensor.ndim == 1 else scales.unsqueeze(1))
        for reader in readers:
            reader.weight.div_(scales)
        for tensor, original in narrow:
            tensor.copy_(original)


def _parameters(source: nn.Module, *readers: nn.Module) -> Iterator[Tensor]:
    """Yield what changes when `source` is scaled and `readers` compensate: its weight and bias, their weights."""
    yield source.weight
    if isinstance(getattr(source, "bias", None), Tensor):
        yield source.bias
    yield from (reader.weight for reader in readers)


def _scope(calls: _Calls, names: tuple[str, ...]) -> str:
    """Return the smallest module around the given layers that was called, so that scaling can be tested on it."""
    parts = [name.split(".")[:-1] for name in names]
    common: list[str] = []
    for level in zip(*parts, strict=False):
        if len(set(level)) > 1:
            break
        common.append(level[0])
    while ".".join(common) not in calls.arguments:
        common.pop()  # a ModuleList, for example, is never called itself; "", the model, always is
    return ".".join(common)


def _input_of(calls: _Calls, name: str) -> Tensor | None:
    args, kwargs = calls.arguments[name]
    return next((value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)), None)


def _dims(module: nn.Module) -> int:
    weight = getattr(module, "weight", None)
    return weight.ndim if isinstance(weight, Tensor) and not isinstance(module, nn.Embedding) else 0


def _tensors(output: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor)]
