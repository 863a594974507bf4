"""Measurement of an accelerator's matmul FLOP/s and memory copy rate, part of the GPU benchmark.

Run: `gpu_rates.py RESULT DEVICE`.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from stages.parallel.accelerator import device_name

MEASURE_S = 1.0
SIZES = {"cpu": 512, "rest": 8192}
COPY_BYTES = {"cpu": 2**26, "rest": 2**31}


def main() -> None:
    device = torch.device(sys.argv[2])
    size, num_bytes = (of.get(device.type, of["rest"]) for of in (SIZES, COPY_BYTES))
    rates = {
        f"{str(dtype).removeprefix('torch.')} {size} TFLOP/s": 2
        * size**3
        / shortest_s(product(size, dtype, device))
        / 1e12
        for dtype in (torch.bfloat16, torch.float32)
    }
    source = torch.empty(num_bytes, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    rates["copy on the device, GB/s read and written"] = 2 * num_bytes / shortest_s(lambda: target.copy_(source)) / 1e9
    if device.type != "cpu":
        on_host = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)
        rates["host to device GB/s"] = num_bytes / shortest_s(lambda: target.copy_(on_host)) / 1e9
        rates["device to host GB/s"] = num_bytes / shortest_s(lambda: on_host.copy_(target)) / 1e9
    found = {"status": "rates", "rates": rates, "device_name": device_name(device) or "CPU", "torch": torch.__version__}
    Path(sys.argv[1]).write_text(json.dumps(found))


def product(size: int, dtype: torch.dtype, device: torch.device) -> Callable[[], Any]:
    """Return a function that multiplies two square matrices of side `size`, to be timed."""
    left, right = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    return lambda: left @ right


def shortest_s(work: Callable[[], Any]) -> float:
    """Run a function repeatedly for a second, and return the shortest time in seconds."""
    synchronize = torch.accelerator.synchronize if torch.accelerator.is_available() else lambda: None
    work()
    synchronize()
    times, end_s = [], time.perf_counter() + MEASURE_S
    while time.perf_counter() < end_s:
        start_s = time.perf_counter()
        work()
        synchronize()
        times.append(time.perf_counter() - start_s)
    return min(times)


if __name__ == "__main__":
    main()
