"""Peak FLOP/s of devices without sparsity, the reference for model FLOPs utilization (MFU).

Accelerators: the vendors' data sheets. CPUs: the measured rate of a large matrix product, with the threads and dtype of
the training, since no data sheet says what a shared virtual machine gives. Other programs make a measurement only too
low, so the best on a CPU of this kind is kept in $LIFECYCLE_HOME.
"""

import fcntl
import json
import os
import platform
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

from stages.core.files import write_atomically
from stages.parallel.accelerator import device_name

MEASURE_S = 0.3
"""Seconds for which the CPU's matrix products are timed, to estimate its peak FLOP/s."""
MATRIX_SIZES = (128, 256, 512, 1024)
NEXT_SIZE_COST = 8
"""Assumed ratio of run times when the size of a matrix product doubles, to stop timing the CPU before time is up."""

ISA_LIMITS = ("ONEDNN_MAX_CPU_ISA", "ATEN_CPU_CAPABILITY", "MKL_ENABLE_INSTRUCTIONS")
"""Environment variables by which users keep torch's libraries from using some instructions of the CPU."""

TFLOPS = {  # part of the device's name: (bf16, TF32, fp32), dense
    "B300": (2250, 1120, 75),
    "B200": (2250, 1120, 75),
    "GB200": (2500, 1250, 80),
    "H200": (989, 494, 67),
    "H100 PCIe": (756, 378, 51),
    "H100 NVL": (835, 417, 60),
    "H100": (989, 494, 67),
    "H20": (148, 74, 44),
    "GH200": (989, 494, 67),
    "H800": (989, 494, 67),
    "A100": (312, 156, 19.5),
    "A800": (312, 156, 19.5),
    "A10G": (70, 35, 35),
    "A10": (125, 62.5, 31.2),
    "A40": (150, 74.8, 37.4),
    "A6000": (155, 77.4, 38.7),
    "L40S": (362, 183, 91.6),
    "L40": (181, 90.5, 90.5),
    "L4": (121, 60, 30.3),
    "T4": (65, None, 8.1),
    "RTX 5090": (209.5, 104.8, 104.8),
    "RTX 4090": (165, 82.6, 82.6),
    "RTX 3090": (71, 35.6, 35.6),
    "MI355X": (2516, None, 157),
    "MI350X": (2307, None, 144),
    "MI325X": (1307, 654, 163),
    "MI300X": (1307, 654, 163),
}


@dataclass(frozen=True)
class Peak:
    """Peak FLOP/s of one process's device, and the source of that number: a data sheet or a measurement."""

    flops_per_s: float
    device_name: str
    source: Literal["data sheet", "measured"]


def device_peak(device: torch.device, dtype: torch.dtype) -> Peak | None:
    """Return the peak FLOP/s of matrix products in `dtype`; None for an accelerator that is not in the table.

    A CPU without units for `dtype` multiplies larger matrices of it in fp32, and small ones a hundred times slower: its
    peak is the better of the two.
    """
    name = device_name(device)
    if name is None:
        rate = max(best_matmul_rate(one) for one in {dtype, torch.float32})
        return Peak(rate, f"CPU, {torch.get_num_threads()} threads", "measured")
    tf32 = torch.get_float32_matmul_precision() != "highest"  # "high" and "medium" allow TF32 for fp32 products
    flops_per_s = data_sheet_peak(name, dtype, tf32)
    return Peak(flops_per_s, name, "data sheet") if flops_per_s else None


def data_sheet_peak(device_name: str, dtype: torch.dtype, tf32: bool = False) -> float | None:
    """Return the dense FLOP/s in the vendor's data sheet, by the accelerator's name; None where the table has none."""
    known = [name for name in TFLOPS if _is_part(name, device_name)]
    if not known:
        return None
    # The longest name that fits: "H100 PCIe" before "H100".
    half, tf32_rate, single = TFLOPS[max(known, key=len)]
    rate = half if dtype in (torch.bfloat16, torch.float16) else tf32_rate if tf32 else single
    return rate * 1e12 if rate else None


def best_matmul_rate(dtype: torch.dtype) -> float:
    """Measure the FLOP/s of the CPU's matrix products; return the best rate of this and earlier times."""
    rate = measured_matmul_rate(dtype)
    kept_file = Path(os.environ.get("LIFECYCLE_HOME", ".lifecycle")).resolve() / "cache" / "matmul-rates.json"
    # In the key, or a rate measured without limits would be the peak of a limited run.
    limits = [f"{name}={os.environ[name]}" for name in ISA_LIMITS if name in os.environ]
    key = ", ".join([_cpu_name(), *limits, f"{torch.get_num_threads()} threads", str(dtype).removeprefix("torch.")])
    kept_file.parent.mkdir(parents=True, exist_ok=True)
    with kept_file.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # ranks that measure at the same time would lose each other's entries
        try:
            rates = json.loads(kept_file.read_bytes())
            rate = max(rate, float(rates.get(key, 0.0)))
        except (OSError, ValueError):  # not there yet, or the disk has damaged it: it is written again
            rates = {}
        if rates.get(key) != rate:
            write_atomically(kept_file, json.dumps({**rates, key: rate}, indent=1))
    return rate


def _cpu_name() -> str:
    """Return the CPU's model and the instruction set that torch uses on it."""
    about = Path("/proc/cpuinfo")
    lines = about.read_text().splitlines() if about.is_file() else []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return f"{next(names, platform.machine())} ({torch.backends.cpu.get_cpu_capability()})"


def measured_matmul_rate(dtype: torch.dtype) -> float:
    """Return the best FLOP/s of square matrix products on the CPU in 0.3 s, with torch's threads or one.

    On a busy machine threads that wait for each other can be slower than one.
    """
    num_threads = torch.get_num_threads()
    try:
        rates = []
        for threads in sorted({1, num_threads}):
            torch.set_num_threads(threads)
            rates.append(_best_rate(dtype, MEASURE_S / 2))
    finally:
        torch.set_num_threads(num_threads)
    return max(rates)


def _best_rate(dtype: torch.dtype, budget_s: float) -> float:
    end = time.perf_counter() + budget_s
    rate = 0.0
    for size in MATRIX_SIZES:
        shortest_s = _shortest_product_s(size, dtype, budget_s / len(MATRIX_SIZES))
        rate = max(rate, 2 * size**3 / shortest_s)  # n³ multiplications and as many additions
        if time.perf_counter() + NEXT_SIZE_COST * shortest_s > end:
            break  # without instructions for this dtype a CPU can be a hundred times slower than in fp32
    return rate


def _shortest_product_s(size: int, dtype: torch.dtype, budget_s: float) -> float:
    left, right = (torch.randn(size, size).to(dtype) for _ in range(2))
    left @ right  # the first one starts threads and chooses a kernel
    times_s: list[float] = []
    deadline = time.perf_counter() + budget_s
    while not times_s or time.perf_counter() < deadline:
        start = time.perf_counter()
        left @ right
        times_s.append(time.perf_counter() - start)
    return min(times_s)


def _is_part(name: str, device_name: str) -> bool:
    """Return whether a device's name, split at hyphens and underscores, has all words of a name (`H100 PCIe`)."""
    words = device_name.replace("-", " ").replace("_", " ").upper().split()
    return all(word in words for word in name.upper().split())
