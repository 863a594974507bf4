"""What each process of this machine runs on, as the planner takes it.

A CPU is described as one device that all processes of the machine share evenly; of accelerators each process has one.
The description is a YAML file (`lifecycle calibrate` writes one) or the built-in one of a device of this name.
"""

from __future__ import annotations

import os
from dataclasses import replace
from functools import cache
from pathlib import Path

from stages.planner.devices import HARDWARE
from stages.planner.hardware import Hardware
from stages.planner.hardware_file import built_in, from_yaml

BF16_FEATURES = frozenset({"avx512_bf16", "amx_bf16", "bf16"})
"""Names in `/proc/cpuinfo` of x86 and, the last, of ARM."""
BF16_UNITS_GAIN = 4.0
"""Rate of bf16 products over that of fp32 ones: 0.80 and 0.21 TFLOP/s were measured on two cores with AVX512-BF16."""


def hardware_at_hand(device_name: str | None, processes: int, file: Path | None) -> Hardware | None:
    """What each of this machine's `processes` runs on; None for an accelerator without a description.

    device_name: the accelerator's, None on a CPU. file: the description, if it is there.
    Raises RecipeError when the file cannot be read.
    """
    if file and file.is_file():
        hardware: Hardware | None = from_yaml(file)
    else:
        hardware = named_like(device_name) if device_name else cpu_of(len(os.sched_getaffinity(0)))
    return shared_cpu(hardware, processes) if hardware and device_name is None else hardware


def named_like(device_name: str) -> Hardware | None:
    """The built-in description whose name's parts are all words of the device's: `NVIDIA A100-SXM4-80GB`."""
    words = device_name.lower().replace("-", " ").replace("_", " ").split()
    known = [name for name in HARDWARE if set(name.split("-")) <= set(words)]
    return HARDWARE[max(known, key=len)] if known else None


def cpu_of(num_cores: int) -> Hardware:
    """Describe a machine of this many cores, each like those of the built-in description but for its units of bf16."""
    cpu = built_in("cpu")
    factor = num_cores / cpu.num_processors
    bf16_tflops = BF16_UNITS_GAIN * cpu.fp32_tflops if has_bf16_units() else cpu.bf16_tflops
    return replace(
        cpu, bf16_tflops=factor * bf16_tflops, fp32_tflops=factor * cpu.fp32_tflops, num_processors=num_cores
    )


@cache
def has_bf16_units() -> bool:
    """Return whether this machine's CPU multiplies bf16 by instructions of its own, as far as Linux names them."""
    about = Path("/proc/cpuinfo")
    lines = about.read_text().splitlines() if about.is_file() else []
    features = (line.partition(":")[2].split() for line in lines if line.startswith(("flags", "Features")))
    return not BF16_FEATURES.isdisjoint(next(features, ()))


def shared_cpu(machine: Hardware, processes: int) -> Hardware:
    """One process's share of a machine without accelerators."""
    return replace(
        machine,
        bf16_tflops=machine.bf16_tflops / processes,
        fp32_tflops=machine.fp32_tflops / processes,
        memory_gib=machine.memory_gib / processes,
        memory_gb_per_s=machine.memory_gb_per_s / processes,
        num_processors=max(1, machine.num_processors // processes),
        gpus_per_node=processes,
    )
