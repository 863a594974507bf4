"""Devices and the links between them: data-sheet numbers, and the few constants that say what is achieved of them.

Those built in are in `devices`; others come from a YAML file with the same fields (`hardware_file`). The constants in
`Efficiency` are fitted to published runs by `tests/benchmarks/planner_accuracy.py`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from stages.parallel.layout import EngineName, Layout
from stages.planner.workload import PlannedPrecision, Software, our_software


@dataclass(frozen=True)
class Efficiency:
    """What programs achieve of the data sheet, for all devices of a kind alike."""

    matmul: float = 0.80
    """Of the peak, by a product that is large in every dimension."""
    matmul_half_waves: float = 1.125
    """Waves of output tiles over the device's processors at which half of that is reached."""
    matmul_half_depth: float = 109.0
    """Length of the summed dimension at which half of that is reached."""
    grouped: float = 0.62
    """Rate of the experts' grouped products over that of dense ones."""
    attention: float = 0.5
    """Of the peak, by a fused attention kernel."""
    attention_in_eight_bits: float = 1.25
    """Rate of that kernel with products in 8 bits over that in 16: what is between them is in fp32 either way."""
    first_flash_attention: float = 0.31
    """Of the peak, by the first version of such a kernel."""
    memory: float = 0.93
    """Of the memory bandwidth, by kernels that stream."""
    intra_link: float = 0.765
    """Of the bandwidth within a node, by collectives."""
    inter_link: float = 0.7
    """Of the bandwidth between nodes, by collectives."""
    overlapped: float = 0.61
    """Of communication that can run beside compute, the part that does."""
    launch_s: float = 31.3e-6
    """Host time of one kernel launch from an eager program."""
    runtime_gib: float = 1.5
    """Held by the driver and libraries."""
    communicator_gib: float = 1.0
    """Held by the buffers of each group that communicates."""
    fragmentation: float = 0.13
    """Of what comes and goes within a step, as much again lies idle between tensors; what stays leaves no gaps."""


@dataclass(frozen=True)
class Hardware:
    """A cluster of equal devices."""

    name: str
    bf16_tflops: float
    """Dense peak of matrix products."""
    fp32_tflops: float
    fp8_tflops: float | None
    memory_gib: float
    memory_gb_per_s: float
    num_processors: int
    """Streaming multiprocessors, compute units or cores."""
    gpus_per_node: int
    intra_node_gb_per_s: float
    """Of one device to the others of its node, one direction."""
    inter_node_gb_per_s: float
    """Of one device's share of its node's network, one direction."""
    sustained: float = 1.0
    """Share of the peak that power and clocks allow a long run, relative to an A100."""
    intra_node_latency_s: float = 8e-6
    """Of one collective."""
    inter_node_latency_s: float = 20e-6
    host_is_device: bool = False
    """Whether what launches kernels also runs them, as on a CPU: neither then goes on beside the other."""
    efficiency: Efficiency = Efficiency()
    sustained_gain_eight_bits: float = 1.0
    """How much more of its peak a product in 8 bits sustains: it draws less power for it."""
    price_per_device_hour: float | None = None
    """In any currency; reports say what a refresh has cost by it."""
    fp4_tflops: float | None = None
    host_gb_per_s: float = 25.0
    """Between a device and its host's memory, one direction (PCIe 4; 50: PCIe 5; more: one that is part of the GPU)."""
    software: tuple[tuple[str, bool | int | float], ...] = ()
    """Fields of `Software` in which what trains here differs from our engines."""

    def software_of(self, engine: EngineName, layout: Layout) -> Software:
        """Of an engine under a layout, as it runs here."""
        changes: dict[str, Any] = dict(self.software)
        return replace(our_software(engine, layout), **changes)

    def peak_flops_per_s(self, precision: PlannedPrecision) -> float:
        """Dense peak of matrix products; a device without fp4 does them in fp8, and without fp8 in bf16."""
        eight_bits = self.fp8_tflops or self.bf16_tflops
        tflops = {
            "fp32": self.fp32_tflops,
            "bf16": self.bf16_tflops,
            "fp8": eight_bits,
            "fp4": self.fp4_tflops or eight_bits,
        }
        return tflops[precision] * 1e12

    def sustained_flops_per_s(self, precision: PlannedPrecision) -> float:
        """The peak that a long run can come near."""
        gain = self.sustained_gain_eight_bits if precision in ("fp8", "fp4") else 1.0
        return gain * self.sustained * self.peak_flops_per_s(precision)
