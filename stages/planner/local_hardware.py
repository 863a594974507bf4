"""What each process of this machine runs on, as the planner takes it.

A CPU is described as one device that all processes of the machine share evenly; of accelerators each process has one.
The description is a YAML file (`lifecycle calibrate` writes one) or the built-in one of a device of this name.
"""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

from stages.planner.devices import HARDWARE
from stages.planner.hardware import Hardware
from stages.planner.hardware_file import built_in, from_yaml


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
    """A machine of this many cores, each like those of the built-in description."""
    cpu = built_in("cpu")
    factor = num_cores / cpu.num_processors
    return replace(
        cpu, bf16_tflops=factor * cpu.bf16_tflops, fp32_tflops=factor * cpu.fp32_tflops, num_processors=num_cores
    )


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
