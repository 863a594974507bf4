"""Accelerator of this process, used through torch functions that are the same for all kinds of devices."""

import importlib
import importlib.util
import os
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import torch

from stages.core.errors import ResourceError
from stages.parallel.compiler import missing_compiler
from stages.parallel.device_types import (
    ALLOCATOR_VARIABLES,
    DEVICE_TYPES,
    DeviceType,
    are_hidden,
    built_without,
    check_capability,
    device_type,
    num_listed,
    unseen,
)

ROOT = Path("/")
"""Root folder below which drivers list their devices as files."""


def type_at_hand() -> DeviceType:
    """Return the kind of accelerator that this process sees, else that of CPUs.

    Raises ResourceError for an unknown kind, and where torch sees none of those that a driver lists.
    """
    for kind in DEVICE_TYPES:  # torch knows the devices of a plugin once it is imported
        if kind.plugin and importlib.util.find_spec(kind.plugin):
            importlib.import_module(kind.plugin)
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is None and (problem := unseen_devices()):
        raise ResourceError("; ".join(problem))
    return of_device(accelerator or torch.device("cpu"))


def unseen_devices(num_gpus: int = 0) -> tuple[str, str] | None:
    """Return an error and its remedy if a driver lists devices that torch does not see (not hidden ones); else None.

    num_gpus: NVIDIA GPUs that the caller has found listed.
    """
    if torch.accelerator.is_available():
        return None
    for kind in DEVICE_TYPES:
        # Kinds without device files cannot be missed: nothing says that there should be some.
        number = num_listed(kind, ROOT) or (num_gpus if kind.listed_in else 0)
        if number and not are_hidden(kind, os.environ):
            return unseen(kind, number, _why_unseen(kind))
    return None


def _why_unseen(kind: DeviceType) -> str:
    if problem := built_without(kind):
        return problem
    try:
        torch.get_device_module(kind.torch_type).init()
    except (RuntimeError, AssertionError) as error:  # a driver that is too old, or lists devices of the host
        return f"torch {torch.__version__} cannot use them ({str(error).splitlines()[0]})"
    return f"torch {torch.__version__} sees none"


@cache
def of_device(device: torch.device) -> DeviceType:
    """Return the `DeviceType` (our description) of a torch device. Raises ResourceError for an unknown one."""
    known = [row for row in DEVICE_TYPES if row.torch_type == device.type]
    if not known:
        names = ", ".join(row.name for row in DEVICE_TYPES)
        raise ResourceError(f"training on a device of type {device.type}, which is unsupported; supported: {names}")
    # AMD's GPUs have the name of NVIDIA's in torch; the build distinguishes them.
    return device_type("rocm") if len(known) > 1 and torch.version.hip else known[0]


def device_of_this_process() -> torch.device:
    """Return this process's accelerator, chosen by local rank and made the current device; else the CPU."""
    # As of matrix products, which torch computes in fp32 by default: a tower's convolution of patches had
    # three correct digits on GPUs, so that no real model that sees passed its checks there.
    torch.backends.cudnn.allow_tf32 = False
    accelerator = type_at_hand()
    if accelerator.torch_type == "cpu":
        return torch.device("cpu")
    if "several processes" in accelerator.lacks:  # one device a machine, without an index
        return torch.device(accelerator.torch_type)
    if accelerator.allocator and os.environ.keys().isdisjoint(ALLOCATOR_VARIABLES):
        # Not by the variable: vLLM's server, which this process may start, refuses expandable segments when it sleeps.
        torch._C._accelerator_setAllocatorSettings(accelerator.allocator)
    device = torch.device(accelerator.torch_type, int(os.environ.get("LOCAL_RANK", "0")))
    # Current device: tensors and NCCL's communicators of this process go there, not to device 0.
    torch.accelerator.set_device_index(device.index)
    return device


@cache
def capability_of(device: torch.device) -> tuple[int, int] | None:
    """Return the compute capability of an accelerator, such as (9, 0); None if its kind has no such number."""
    module: Any = torch.get_device_module(device)
    return module.get_device_capability(device) if hasattr(module, "get_device_capability") else None


def fused(function: Callable[..., Any], device: torch.device) -> Callable[..., Any]:
    """Return an elementwise function compiled, where the device's kernels can be: else the function itself."""
    if device.type in ("cpu", "meta"):  # a CPU's operations find a bucket in its cache
        return function
    cannot = "compile" in of_device(device).lacks or capability_of(device) is None or missing_compiler(True)
    return function if cannot else _compiled(function)


@cache
def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    return torch.compile(function, dynamic=True, fullgraph=True)


def check_precision(found: DeviceType, precision: str) -> None:
    """Raise ResourceError if this process's accelerator is too old to compute in the recipe's precision (fp8)."""
    if found.fp8_from > (0, 0):
        module: Any = torch.get_device_module(found.torch_type)
        check_capability(found, module.get_device_capability(), precision)


def compute_deterministically() -> None:
    """Make torch operations give the same bits each time (else RuntimeError); call before using the device.

    Source of the variables: torch's page on reproducibility, Transformer Engine's on environment variables.
    """
    # cuBLAS reads it when a handle is made, so before the device is first used. :4096:8 is 8 buffers of 4 MiB.
    os.environ |= {"CUBLAS_WORKSPACE_CONFIG": ":4096:8", "NVTE_ALLOW_NONDETERMINISTIC_ALGO": "0"}
    torch.use_deterministic_algorithms(True)
    # Else torch would write to all memory that is still empty, such as that of weights that are read later.
    torch.utils.deterministic.fill_uninitialized_memory = False


def in_float64(values: torch.Tensor) -> torch.Tensor:
    """Convert values to float64 on their device, or on the host if the device has no float64."""
    return values.double() if of_device(values.device).has_float64 else values.cpu().double()


def free_bytes(device: torch.device) -> int:
    """Return the free memory of an accelerator in bytes."""
    module: Any = torch.get_device_module(device)
    if hasattr(module, "mem_get_info"):
        return module.mem_get_info(device)[0]
    return module.recommended_max_memory() - module.driver_allocated_memory()  # Metal


def total_bytes(device: torch.device) -> int:
    """Return the whole memory of an accelerator in bytes."""
    module: Any = torch.get_device_module(device)
    return module.mem_get_info(device)[1] if hasattr(module, "mem_get_info") else module.recommended_max_memory()


def peak_bytes(device: torch.device) -> int:
    """Return this process's peak tensor memory in bytes since `forget_peak`; on Metal the allocator's current one."""
    module: Any = torch.get_device_module(device)
    if hasattr(module, "max_memory_allocated"):
        return module.max_memory_allocated(device)
    return module.driver_allocated_memory()


def forget_peak(device: torch.device) -> None:
    """Reset the peak memory that `peak_bytes` returns."""
    module: Any = torch.get_device_module(device)
    if hasattr(module, "reset_peak_memory_stats"):
        module.reset_peak_memory_stats(device)
    else:
        module.empty_cache()


def device_name(device: torch.device) -> str | None:
    """Return the driver's name of an accelerator; None for a CPU."""
    if device.type == "cpu":
        return None
    module: Any = torch.get_device_module(device)
    return module.get_device_name(device) if hasattr(module, "get_device_name") else of_device(device).title
