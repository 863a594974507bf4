"""Packages of GPU kernels that Transformers finds installed (flash-linear-attention, causal-conv1d, mamba-ssm).

Transformers calls their functions on every device, though they have kernels for GPUs alone: a check on a CPU would
fail. One of them, installed whole, also replaces some of Transformers' model classes.
"""

import sys
from collections.abc import Callable
from functools import wraps
from inspect import getclosurevars, signature
from types import FunctionType
from typing import Any

DECORATOR = "use_kernel_func_from_hub_with_fallback"
"""Name of Transformers' decorator of functions that packages replace."""


def has_kernels(device: Any) -> bool:
    """Return whether the packages' kernels run on a `torch.device`."""
    return device.type not in ("cpu", "meta")


def keep_models_of_transformers() -> None:
    """Hide the model classes of flash-linear-attention, which register themselves in Transformers' auto classes."""
    for name in ("fla.layers", "fla.models"):
        sys.modules.setdefault(name, None)  # type: ignore[arg-type]  # means: there is no such module


def use_kernels_on_gpus_alone(model: Any) -> None:
    """Make the functions that packages replace in a model's code those of Transformers on a CPU, in this process."""
    for name in {type(module).__module__ for module in model.modules()}:
        for attribute, function in list(vars(sys.modules[name]).items()):
            if _is_replaced(function):
                setattr(sys.modules[name], attribute, _by_device(function))


def _is_replaced(function: Any) -> bool:
    is_decorated = isinstance(function, FunctionType) and function.__code__.co_qualname.startswith(f"{DECORATOR}.")
    return is_decorated and bool(getclosurevars(function).nonlocals["is_new_implementation"])


def _by_device(function: Any) -> Callable[..., Any]:
    """Return a function that calls that of a package for tensors on a GPU, and Transformers' own for others."""
    plain = function.__wrapped__
    known = signature(plain).parameters

    @wraps(plain)
    def chosen(*arguments: Any, **options: Any) -> Any:
        states = next(one for one in (*arguments, *options.values()) if hasattr(one, "device"))
        if has_kernels(states.device):
            return function(*arguments, **options)
        return plain(*arguments, **{name: value for name, value in options.items() if name in known})

    return chosen
