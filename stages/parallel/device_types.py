"""Kinds of devices that training may run on, a row each; the only place that names one of them.

Everything else asks a row: the backend of collectives, the variable that chooses devices, what is missing. Pure; calls
of torch are in `accelerator.py`. Tried so far: CPUs. The other rows are written from the documentation of torch and of
the vendors' plugins.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from stages.core.errors import ResourceError
from stages.parallel.layout import EngineName, Layout

Feature = Literal["megatron", "fp8", "several processes", "cpu_offload", "compile"]


@dataclass(frozen=True)
class DeviceType:
    """A kind of device: its names in torch, and its limits here."""

    name: str
    title: str
    torch_type: str
    """Type in torch, `torch.device(…).type`; AMD's GPUs have the name of NVIDIA's."""
    collectives: str
    """Backend of `torch.distributed` for tensors on this kind of device."""
    visible_devices: str | None = None
    """Environment variable that limits the devices that a process sees."""
    plugin: str | None = None
    """Package without which torch does not know this kind of device."""
    pins_host_memory: bool = True
    has_float64: bool = True
    has_flash_kernel: bool = False
    """True if `torch.nn.attention.varlen` runs on this kind of device."""
    fp8_from: tuple[int, int] = (0, 0)
    """Compute capability from which on a device multiplies in 8 bits."""
    lacks: Mapping[Feature, str] = field(default_factory=dict)
    """Features that a kind of device lacks, each with the reason."""

    @property
    def backends(self) -> str:
        """Backends for `init_process_group`.

        CPU tensors always have one: checkpoints and offloaded gradients need it.
        """
        return "gloo" if self.torch_type == "cpu" else f"cpu:gloo,{self.torch_type}:{self.collectives}"


INSTALLATION = "pip install --no-deps -r deploy/requirements/fp8.in"
_MEGATRON = "Megatron-core knows CUDA's devices only; use `engine: fsdp`"
_EIGHT_BITS = "products in 8 bits are for NVIDIA's GPUs here; say `precision: bf16`"
DEVICE_TYPES = (
    DeviceType("cuda", "NVIDIA GPUs", "cuda", "nccl", "CUDA_VISIBLE_DEVICES", has_flash_kernel=True, fp8_from=(8, 9)),
    DeviceType(
        "rocm",
        "AMD GPUs (ROCm)",
        "cuda",
        "nccl",
        "HIP_VISIBLE_DEVICES",
        has_flash_kernel=True,
        lacks={"fp8": _EIGHT_BITS},
    ),
    DeviceType(
        "npu",
        "Huawei Ascend NPUs",
        "npu",
        "hccl",
        "ASCEND_RT_VISIBLE_DEVICES",
        plugin="torch_npu",
        lacks={
            "megatron": _MEGATRON,
            "fp8": _EIGHT_BITS,
            "compile": "Inductor makes no kernels for it; say `compile: false`",
        },
    ),
    DeviceType(
        "xpu", "Intel GPUs", "xpu", "xccl", "ZE_AFFINITY_MASK", lacks={"megatron": _MEGATRON, "fp8": _EIGHT_BITS}
    ),
    DeviceType(
        "mps",
        "Apple GPUs (Metal)",
        "mps",
        "gloo",
        pins_host_memory=False,
        has_float64=False,
        lacks={
            "megatron": _MEGATRON,
            "fp8": _EIGHT_BITS,
            "several processes": "a machine has one such device; start one process",
            "cpu_offload": "device and host share their memory; say `cpu_offload: false`",
        },
    ),
    DeviceType(
        "cpu",
        "CPUs",
        "cpu",
        "gloo",
        pins_host_memory=False,
        lacks={"fp8": _EIGHT_BITS},
    ),
)


def device_type(name: str) -> DeviceType:
    """Return the device type of a name."""
    return next(row for row in DEVICE_TYPES if row.name == name)


def check_device(device: DeviceType, engine: EngineName, layout: Layout, precision: str) -> None:
    """Raise ResourceError, with the reasons, when training needs features that this kind of device lacks."""
    asked: dict[Feature, bool] = {
        "megatron": engine == "megatron",
        "fp8": precision == "fp8",
        "several processes": layout.world_size > 1,
        "cpu_offload": layout.cpu_offload,
        "compile": layout.compile,
    }
    lacking = [f"{feature}: {why}" for feature, why in device.lacks.items() if asked[feature]]
    if lacking:
        raise ResourceError(f"training on {device.title} ({device.name}), which lack {'; '.join(lacking)}")


def check_capability(device: DeviceType, capability: tuple[int, int], precision: str) -> None:
    """Raise ResourceError when devices of this compute capability do not multiply in the precision."""
    if precision == "fp8" and capability < device.fp8_from:
        needed, had = (".".join(map(str, version)) for version in (device.fp8_from, capability))
        raise ResourceError(
            f"training on {device.title} of compute capability {had}, which do not multiply in 8 bits; "
            f"`precision: fp8` needs {needed} or later (Ada, Hopper, Blackwell): say `precision: bf16`"
        )


def missing_package(engine: EngineName, precision: str) -> str | None:
    """Return which package products in 8 bits need here and how to install it; None where nothing is missing.

    Megatron looks for Transformer Engine itself.
    """
    if precision != "fp8" or engine != "fsdp" or importlib.util.find_spec("torchao"):
        return None
    return (
        "`precision: fp8` with `engine: fsdp` multiplies by torchao, which is not installed here; install it "
        f"(`{INSTALLATION}`), or say `precision: bf16`"
    )
