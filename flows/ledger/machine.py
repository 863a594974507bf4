"""Facts about this machine, read in under a millisecond without torch or nvidia-smi: cores, GPUs, memory, energy."""

import os
from collections.abc import Sequence
from pathlib import Path

GPUS = Path("/proc/driver/nvidia/gpus")


def num_cores() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0))


def gpus() -> list[str]:
    """Return the model names of this machine's NVIDIA GPUs, as the driver lists them under /proc."""
    files = sorted(GPUS.glob("*/information"))
    return [_value(file, "Model") or "NVIDIA GPU" for file in files]


def num_slots() -> int:
    """Return the number of device slots for running stages: the number of GPUs, or of cores without GPUs."""
    return len(gpus()) or num_cores()


def hardware() -> str:
    """Return the machine's GPUs, or else its CPU, as text, such as `2 × NVIDIA H100 80GB HBM3`."""
    names = gpus()
    if names:
        return f"{len(names)} × {names[0]}"
    return f"{num_cores()} × {_value(Path('/proc/cpuinfo'), 'model name') or 'CPU'}"


def memory_gib() -> tuple[float, float]:
    """Return the available and the total host memory, in GiB."""
    available, total = (_value(Path("/proc/meminfo"), name) or "0" for name in ("MemAvailable", "MemTotal"))
    return _kib_to_gib(available), _kib_to_gib(total)


def _kib_to_gib(text: str) -> float:
    return int(text.split()[0]) / 2**20


def _value(file: Path, name: str) -> str | None:
    """Return the text after the first `NAME:` in a file of /proc; None when the name is absent."""
    for line in file.read_text().splitlines():
        key, _, value = line.partition(":")
        if key.strip() == name:
            return value.strip()
    return None


def energy_j(devices: Sequence[int]) -> float | None:
    """Return the energy, in joules, that GPUs used since their driver was loaded; None without GPUs or counters.

    A GPU counts all processes that use it. GPUs older than Volta have no counter.
    """
    if not devices:
        return None
    import pynvml

    try:
        pynvml.nvmlInit()
        handles = [pynvml.nvmlDeviceGetHandleByIndex(number) for number in devices]
        # NVML counts millijoules.
        return sum(pynvml.nvmlDeviceGetTotalEnergyConsumption(handle) for handle in handles) / 1000
    except pynvml.NVMLError:
        return None
