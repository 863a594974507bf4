"""Energy that GPUs of this machine have used, as NVIDIA's management library counts it."""

from __future__ import annotations

from collections.abc import Sequence


def energy_j(devices: Sequence[int]) -> float | None:
    """Joules that these GPUs have used since their driver was loaded; None where there are none, or nothing counts.

    A GPU's count is of the whole device, whichever process uses it; those before Volta have none.
    """
    if not devices:
        return None
    import pynvml

    try:
        pynvml.nvmlInit()
        handles = [pynvml.nvmlDeviceGetHandleByIndex(number) for number in devices]
        return sum(pynvml.nvmlDeviceGetTotalEnergyConsumption(handle) for handle in handles) / 1000
    except pynvml.NVMLError:
        return None
