"""Patches that let Megatron-core run on a CPU with gloo; with a CUDA device nothing is patched.

Megatron-core has no notion of another device: it asks `torch.cuda` for one and names "cuda" in every factory. So each
of its modules gets, under its global name `torch`, a view of torch in which these mean the CPU; torch itself, seen from
anywhere else, stays as it is. The patches, and why each is needed:

    torch.cuda.current_device, "cuda" in factories  the device of every buffer, counter and norm
    torch.cuda.{synchronize, empty_cache, nvtx, …}  no-ops: the host executes in order
    torch.cuda.{Stream, Event, …}                   inert: the MoE dispatcher and some optimizers make them
    torch.cuda random state                         the CPU generator, which the tracker of random states forks
    torch.distributed.{all_gather, reduce_scatter}  as broadcasts and reductions where ranks have different sizes, which
                                                    gloo refuses and NCCL allows: experts that are split over tensors
    torch.distributed.new_group                     one group for the same ranks: Megatron asks for about thirty, and
                                                    each of gloo's has threads that wake up a hundred times a second
    Tensor.cuda, called by Megatron                 the tensor itself: tied embeddings are moved and compared
    Tensor.type, called by Megatron                 'torch.cuda.FloatTensor' for 'torch.FloatTensor': optimizers sort
                                                    parameters by that name
    token_dispatcher.maybe_move_tensor_to_cpu       counts as NumPy arrays: it skips what already is on the CPU

The patches depend on private parts, so they are bound to one version.
"""

from __future__ import annotations

import functools
import importlib
import logging
import pkgutil
import sys
import types
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any
from weakref import WeakKeyDictionary

import torch

MEGATRON_VERSION = "0.16.1"
FACTORIES = ("arange", "empty", "empty_like", "full", "ones", "ones_like", "tensor", "zeros", "zeros_like")
PATCHED_PACKAGES = (
    "megatron.core.dist_checkpointing",
    "megatron.core.dist_checkpointing.strategies",
    "megatron.core.distributed",
    "megatron.core.models.common.embeddings",
    "megatron.core.models.gpt",
    "megatron.core.optimizer",
    "megatron.core.pipeline_parallel",
    "megatron.core.tensor_parallel",
    "megatron.core.transformer",
    "megatron.core.transformer.moe",
)
"""Packages of Megatron whose modules are imported before patching, since later imports would stay unpatched."""

_is_prepared = False
_groups: WeakKeyDictionary[Any, dict[tuple[int, ...], Any]] = WeakKeyDictionary()
"""Process groups by ranks, for each world group, so that none is created twice."""


def prepare_megatron() -> None:
    """Import Megatron-core and, without CUDA, patch it for the CPU, before any use of it; may be repeated."""
    global _is_prepared
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that Apex and Transformer Engine are missing is no news on a CPU
        import megatron.core
    # `_is_prepared`: a second patch of `Tensor.cuda` would wrap the first one.
    if torch.cuda.is_available() or _is_prepared:
        return
    found = megatron.core.__version__
    assert found == MEGATRON_VERSION, f"these patches are for megatron-core {MEGATRON_VERSION}, {found} is installed"
    _import_all()
    _give_modules_the_view(_torch_on_cpu())
    _patch_random_state()
    _patch_dispatcher()
    _patch_tensor()
    _is_prepared = True


class _View(types.ModuleType):
    """Stand-in for a module with some names replaced, so that only Megatron-core sees the replacements."""

    def __init__(self, target: Any, **overrides: Any) -> None:
        super().__init__(target.__name__)
        self.__dict__.update(overrides)
        self.__dict__["_target"] = target

    def __getattr__(self, name: str) -> Any:
        value = getattr(self.__dict__["_target"], name)
        if callable(value):  # found at once the next time; a flag may change
            self.__dict__[name] = value
        return value


class _Inert:
    """Stand-in for a CUDA stream or event on a CPU, where work is done when a call returns."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        pass

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Inert)

    __hash__ = object.__hash__

    def __getattr__(self, name: str) -> Callable[..., _Inert]:
        return lambda *_, **__: self  # `stream.record_event()` is an event


def _nothing(*arguments: Any, **options: Any) -> None:
    return None


def _no_context(*arguments: Any, **options: Any) -> AbstractContextManager[None]:
    return nullcontext()


def _torch_on_cpu() -> _View:
    cuda = _View(
        torch.cuda,
        current_device=lambda: "cpu",
        synchronize=_nothing,
        empty_cache=_nothing,
        is_current_stream_capturing=lambda: False,
        get_rng_state=lambda *_, **__: torch.get_rng_state(),  # Megatron names a device, which a CPU has no use for
        set_rng_state=lambda state, *_, **__: torch.set_rng_state(state),
        manual_seed=torch.manual_seed,
        Stream=_Inert,
        Event=_Inert,
        current_stream=_Inert,
        default_stream=_Inert,
        stream=_no_context,
        nvtx=_View(torch.cuda.nvtx, range_push=_nothing, range_pop=_nothing),
    )
    distributed = _View(
        torch.distributed, all_gather=_all_gather, reduce_scatter=_reduce_scatter, new_group=_group_of_ranks
    )
    factories = {name: _on_cpu(getattr(torch, name)) for name in FACTORIES}
    return _View(torch, cuda=cuda, distributed=distributed, **factories)


def _all_gather(tensors: list[torch.Tensor], tensor: torch.Tensor, group: Any = None, async_op: bool = False) -> Any:
    if async_op or len({part.shape for part in tensors}) == 1:
        return torch.distributed.all_gather(tensors, tensor, group=group, async_op=async_op)
    for rank, part in enumerate(tensors):
        if rank == torch.distributed.get_rank(group):
            part.copy_(tensor)
        torch.distributed.broadcast(part, group=group, group_src=rank)
    return None


def _reduce_scatter(output: torch.Tensor, tensors: list[torch.Tensor], group: Any = None) -> None:
    for rank, part in enumerate(tensors):
        # gloo reduces in place: a copy, since the parts may be views of the gradient that Megatron goes on to use.
        total = part.clone(memory_format=torch.contiguous_format)
        torch.distributed.all_reduce(total, group=group)
        if rank == torch.distributed.get_rank(group):
            output.copy_(total)


def _group_of_ranks(ranks: list[int] | None = None, **options: Any) -> Any:
    # By world group: tests join and leave several in one process, and a group dies with its world.
    groups = _groups.setdefault(torch.distributed.group.WORLD, {})
    key = tuple(ranks or ())
    if key not in groups:
        groups[key] = torch.distributed.new_group(ranks, **options)
    return groups[key]


def _on_cpu(factory: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(factory)
    def on_cpu(*arguments: Any, **options: Any) -> Any:
        if "cuda" in str(options.get("device")):
            options["device"] = "cpu"
        options.pop("pin_memory", None)  # pinning asks for CUDA
        return factory(*arguments, **options)

    return on_cpu


def _import_all() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for package_name in PATCHED_PACKAGES:
            package = importlib.import_module(package_name)
            for module in pkgutil.iter_modules(package.__path__, f"{package_name}."):
                _import_if_possible(module.name)


def _import_if_possible(name: str) -> None:
    try:
        importlib.import_module(name)
    except (ImportError, AttributeError):  # needs Transformer Engine, Triton or another package of GPUs
        logging.getLogger(__name__).debug("%s cannot be imported here, so it is not used either", name)


def _give_modules_the_view(view: _View) -> None:
    for name, module in list(sys.modules.items()):
        # A copy of the items, since reading an attribute may import a module. Only modules that have torch as `torch`.
        if name.startswith("megatron.core") and getattr(module, "torch", None) is torch:
            module.torch = view  # type: ignore[attr-defined]


def _patch_random_state() -> None:
    random: Any = importlib.import_module("megatron.core.tensor_parallel.random")
    random._get_cuda_rng_state = lambda *_, **__: torch.get_rng_state()
    random._set_cuda_rng_state = lambda state, *_, **__: torch.set_rng_state(state)
    logging.getLogger(random.__name__).addFilter(lambda record: "CPU RNG state changed" not in record.getMessage())


def _patch_dispatcher() -> None:
    dispatcher: Any = importlib.import_module("megatron.core.transformer.moe.token_dispatcher")

    def to_host(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
        return tensor.numpy() if as_numpy and isinstance(tensor, torch.Tensor) else tensor

    dispatcher.maybe_move_tensor_to_cpu = to_host


def _patch_tensor() -> None:
    torch_cuda, torch_type = torch.Tensor.cuda, torch.Tensor.type

    def cuda(tensor: torch.Tensor, *arguments: Any, **options: Any) -> torch.Tensor:
        return tensor if _called_by_megatron() else torch_cuda(tensor, *arguments, **options)

    def type_(tensor: torch.Tensor, *arguments: Any, **options: Any) -> Any:
        result = torch_type(tensor, *arguments, **options)
        is_name = isinstance(result, str) and _called_by_megatron()
        return result.replace("torch.", "torch.cuda.", 1) if is_name else result

    torch.Tensor.cuda = cuda
    torch.Tensor.type = type_


def _called_by_megatron() -> bool:
    # Frame 0 is this function, 1 the patched method, 2 its caller.
    return str(sys._getframe(2).f_globals.get("__name__", "")).startswith("megatron.core")
