"""Table of the kinds of devices that training may run on; no other module names one of them.

Imports no torch: calls of it are in `accelerator.py`. Tried so far: CPUs. The other rows are written from the
documentation of torch and of the vendors' plugins.
"""

import importlib.metadata
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from stages.core.errors import ResourceError
from stages.core.shipped import install_command
from stages.parallel.engines.registry import RULES
from stages.parallel.layout import EngineName, Layout

Feature = Literal["fp8", "several processes", "cpu_offload", "recompute: offload", "compile"]


@dataclass(frozen=True)
class DeviceType:
    """Kind of device: its names in torch, and what it supports."""

    name: str
    title: str
    torch_type: str
    """Type in torch, `torch.device(…).type`; AMD's GPUs have the same as NVIDIA's."""
    collectives: str
    """Backend of `torch.distributed` for tensors on this kind of device."""
    visible_devices: str | None = None
    """Environment variable that limits which devices a process sees, such as CUDA_VISIBLE_DEVICES."""
    listed_in: tuple[str, ...] = ()
    """Glob patterns of device files below the root folder, which drivers create whatever torch was built for."""
    plugin: str | None = None
    """Python package without which torch does not know this kind of device."""
    pins_host_memory: bool = True
    has_float64: bool = True
    attention: tuple[str, ...] = ("padded",)
    """Names of kernels in `stages/engines/attention_kernels.py`; the first that can compute an attention does."""
    fp8_from: tuple[int, int] = (0, 0)
    """Lowest compute capability of devices that multiply in 8 bits; (0, 0): not checked."""
    allocator: str | None = None
    """Settings of torch's memory allocator, used unless the environment has others."""
    lacks: Mapping[Feature, str] = field(default_factory=dict)
    """Features that this kind of device lacks, each with the reason."""

    @property
    def backends(self) -> str:
        """torch.distributed backends for this kind and, for checkpoints and offloaded gradients, the CPU."""
        return "gloo" if self.torch_type == "cpu" else f"cpu:gloo,{self.torch_type}:{self.collectives}"


_EIGHT_BITS = "products in 8 bits are for NVIDIA's GPUs here; say `precision: bf16`"
_FUSED_ATTENTION = ("flash", "efficient", "flex")
DEVICE_TYPES = (
    DeviceType(
        "cuda",
        "NVIDIA GPUs",
        "cuda",
        "nccl",
        "CUDA_VISIBLE_DEVICES",
        listed_in=("proc/driver/nvidia/gpus/*", "dev/nvidia[0-9]*"),
        attention=("cudnn", *_FUSED_ATTENTION),
        fp8_from=(8, 9),
        # Packed rows have ever new numbers of documents and targets, which leave gaps between segments of fixed sizes.
        allocator="expandable_segments:True",
    ),
    DeviceType(
        "rocm",
        "AMD GPUs (ROCm)",
        "cuda",
        "nccl",
        "HIP_VISIBLE_DEVICES",
        attention=_FUSED_ATTENTION,
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
            "fp8": _EIGHT_BITS,
            "compile": "Inductor makes no kernels for it; say `compile: false`",
        },
    ),
    DeviceType("xpu", "Intel GPUs", "xpu", "xccl", "ZE_AFFINITY_MASK", lacks={"fp8": _EIGHT_BITS}),
    DeviceType(
        "mps",
        "Apple GPUs (Metal)",
        "mps",
        "gloo",
        pins_host_memory=False,
        has_float64=False,
        lacks={
            "fp8": _EIGHT_BITS,
            "several processes": "a machine has one such device; start one process",
            "cpu_offload": "device and host share their memory; say `cpu_offload: false`",
            "recompute: offload": "device and host share their memory; say `recompute: full`",
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
ALLOCATOR_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
"""Environment variables by which a user sets torch's allocator; the second is its old name."""


def device_type(name: str) -> DeviceType:
    """Return the entry for a kind of device, such as `cuda`, from the table of kinds."""
    return next(row for row in DEVICE_TYPES if row.name == name)


def num_listed(device: DeviceType, root: Path) -> int:
    """Count the devices of a kind by the device files that its driver creates; 0 for a kind without device files."""
    # The patterns name the same devices, so the largest count, not the sum.
    return max((len(list(root.glob(pattern))) for pattern in device.listed_in), default=0)


def are_hidden(device: DeviceType, environment: Mapping[str, str]) -> bool:
    """Return whether an environment variable, such as CUDA_VISIBLE_DEVICES, hides all devices of this kind."""
    return device.visible_devices is not None and environment.get(device.visible_devices) in ("", "-1")


def unseen(device: DeviceType, number: int, problem: str) -> tuple[str, str]:
    """Return the error and its remedy for devices that the driver lists, but torch does not see."""
    return (
        f"choosing the device to train on: the driver lists {number} {device.title}, but {problem}, so training would "
        "silently run on the CPU; expected torch to see the devices of the driver",
        f"install torch's build for them (`{install_command('pipeline')}`) and a driver that is new enough, "
        f'give a container its devices, or set {device.visible_devices} to "" (for one stage in its '
        "execution.environment) to train on the CPU",
    )


def built_without(device: DeviceType) -> str | None:
    """Return a clause for an error message if the installed torch was built without this kind of device; else None."""
    try:
        torch = importlib.metadata.distribution("torch")
        lines = Path(str(torch.locate_file("torch/version.py"))).read_text().splitlines()
    except (importlib.metadata.PackageNotFoundError, OSError):
        return None
    # Lines such as `cuda: Optional[str] = None`: read, not imported, since torch takes seconds to import.
    values = {line.partition(":")[0]: line.rpartition("=")[2].strip() for line in lines}
    # None is written where a build lacks the kind; a kind that the file does not name is not judged.
    return f"torch {torch.version} was built without them" if values.get(device.name) == "None" else None


def unusable_gpus(number: int, environment: Mapping[str, str]) -> tuple[str, str] | None:
    """Return the error and its remedy if the driver lists NVIDIA GPUs but torch was built without CUDA; else None.

    environment: environment of the process that would train; None is returned where it hides the GPUs.
    """
    gpu = device_type("cuda")
    problem = None if are_hidden(gpu, environment) else built_without(gpu)
    return unseen(gpu, number, problem) if problem else None


def check_device(device: DeviceType, engine: EngineName, layout: Layout, precision: str) -> None:
    """Raise ResourceError, with the reasons, when training needs an engine or features that the device lacks."""
    asked: dict[Feature, bool] = {
        "fp8": precision == "fp8",
        "several processes": layout.world_size > 1,
        "cpu_offload": layout.cpu_offload,
        "recompute: offload": layout.recompute == "offload",
        "compile": layout.compile,
    }
    refusal = RULES[engine].refuses_device(device.torch_type)
    lacking = [f"{engine}: {refusal}"] if refusal else []
    lacking += [f"{feature}: {why}" for feature, why in device.lacks.items() if asked[feature]]
    if lacking:
        raise ResourceError(f"training on {device.title} ({device.name}), which lack {'; '.join(lacking)}")


def check_capability(device: DeviceType, capability: tuple[int, int], precision: str) -> None:
    """Raise ResourceError when devices of this compute capability cannot compute in the precision (fp8)."""
    if precision == "fp8" and capability < device.fp8_from:
        needed, had = (".".join(map(str, version)) for version in (device.fp8_from, capability))
        raise ResourceError(
            f"training on {device.title} of compute capability {had}, which do not multiply in 8 bits; "
            f"`precision: fp8` needs {needed} or later (Ada, Hopper, Blackwell): say `precision: bf16`"
        )
