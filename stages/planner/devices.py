"""The devices that are built in: data-sheet numbers of common nodes, and what is sustained of them. Pure."""

from __future__ import annotations

from stages.planner.hardware import Efficiency, Hardware

PCIE_5_GB_PER_S = 50
NVLINK_C2C_GB_PER_S = 450
"""Between a Blackwell GPU and the Grace CPU that it shares a module with."""

HARDWARE = {
    hardware.name: hardware
    for hardware in (
        Hardware("v100-32gb", 125, 15.7, None, 31.7, 900, 80, 16, 150, 12.5),
        Hardware("a100-40gb", 312, 19.5, None, 39.4, 1555, 108, 8, 300, 25),
        Hardware("a100-80gb", 312, 19.5, None, 79.2, 2039, 108, 8, 300, 25),
        Hardware("a800-80gb", 312, 19.5, None, 79.2, 2039, 108, 8, 200, 25),
        Hardware(
            "h100-80gb", 989, 67, 1979, 79.1, 3350, 132, 8, 450, 50,
            sustained=0.75, host_gb_per_s=PCIE_5_GB_PER_S,
        ),
        Hardware("h200", 989, 67, 1979, 139.8, 4800, 132, 8, 450, 50, sustained=0.77, host_gb_per_s=PCIE_5_GB_PER_S),
        Hardware(
            "h800-80gb", 989, 67, 1979, 79.1, 3350, 132, 8, 200, 50,
            sustained=0.75, host_gb_per_s=PCIE_5_GB_PER_S,
        ),
        Hardware("h20", 148, 44, 296, 95.1, 4000, 78, 8, 450, 50, host_gb_per_s=PCIE_5_GB_PER_S),
        Hardware(
            "b200", 2250, 75, 4500, 178.4, 8000, 148, 8, 900, 50,
            fp4_tflops=9000, sustained=0.6, sustained_gain_eight_bits=1.2, host_gb_per_s=PCIE_5_GB_PER_S,
        ),
        Hardware(
            "b300", 2250, 75, 4500, 267.7, 8000, 148, 8, 900, 100,
            fp4_tflops=13500, sustained=0.6, sustained_gain_eight_bits=1.42, host_gb_per_s=PCIE_5_GB_PER_S,
        ),
        Hardware(
            "gb200", 2500, 80, 5000, 184.0, 8000, 152, 72, 900, 50,
            fp4_tflops=10000, sustained=0.6, sustained_gain_eight_bits=1.2, host_gb_per_s=NVLINK_C2C_GB_PER_S,
        ),
        Hardware(
            "gb300", 2500, 80, 5000, 276.0, 8000, 152, 72, 900, 100,
            fp4_tflops=15000, sustained=0.6, sustained_gain_eight_bits=1.42, host_gb_per_s=NVLINK_C2C_GB_PER_S,
        ),
        Hardware("l40s", 362, 91.6, 733, 44.4, 864, 142, 8, 25, 12.5, sustained=0.75),
        Hardware("l4", 121, 30.3, 242, 22.5, 300, 58, 8, 25, 12.5),
        Hardware("a10", 125, 31.2, None, 22.5, 600, 72, 8, 25, 12.5),
        Hardware("t4", 65, 8.1, None, 14.6, 320, 40, 4, 12.5, 6.25),
        # GeForce drivers let no device read another's memory: what is sent goes through the host's. The rates of
        # matrix products are those with sums in fp32, half of what is advertised.
        Hardware("rtx-3090", 71, 35.6, None, 23.7, 936, 82, 4, 12.5, 1.25),
        Hardware("rtx-4090", 165, 82.6, 330, 23.6, 1008, 128, 4, 12.5, 1.25),
        Hardware("rtx-5090", 209.5, 104.8, 419, 31.4, 1792, 170, 4, 25, 1.25),
        # One of an MI250X's two dies, which programs see as a device of its own.
        Hardware("mi250x", 191.5, 47.9, None, 63.9, 1638, 110, 8, 50, 12.5, sustained=0.6),
        # One chip with 750 and with 1,000 W, its successor with 1,000 and 1,400 W: power is what sustains.
        Hardware(
            "mi300x", 1307, 163, 2615, 191.5, 5300, 304, 8, 448, 50,
            sustained=0.6, sustained_gain_eight_bits=0.8, host_gb_per_s=PCIE_5_GB_PER_S,
        ),
        Hardware(
            "mi325x", 1307, 163, 2615, 253.5, 6000, 304, 8, 448, 50,
            sustained=0.71, sustained_gain_eight_bits=0.8, host_gb_per_s=PCIE_5_GB_PER_S,
        ),
        Hardware(
            "mi350x", 2307, 144, 4614, 285.1, 8000, 256, 8, 538, 50,
            fp4_tflops=9227, sustained=0.71, sustained_gain_eight_bits=0.8, host_gb_per_s=PCIE_5_GB_PER_S,
        ),
        Hardware(
            "mi355x", 2517, 157, 5033, 285.1, 8000, 256, 8, 538, 50,
            fp4_tflops=10066, sustained=0.79, sustained_gain_eight_bits=0.8, host_gb_per_s=PCIE_5_GB_PER_S,
        ),
        # By what the vendors say; nothing was measured on them. Of a Max 1550 one of two tiles, which programs see as a
        # device of its own; of an M3 Max the one with 40 cores, and three quarters of 64 GB, which Metal may take.
        Hardware("ascend910b2", 376, 94, None, 61.0, 1600, 24, 8, 28, 25, sustained=0.6),
        Hardware("max-1550", 419, 26, None, 64.0, 1638, 64, 8, 53, 25, sustained=0.6),
        Hardware("m3-max", 28, 14, None, 48.0, 400, 40, 1, 1, 1),
        # A whole machine of two cores; a process without any model holds 0.43 GiB: the interpreter, torch.
        Hardware(
            "cpu", 0.1, 0.2, None, 16, 20, 2, 4, 2, 1, 1.0, 1e-3, 1e-3, True,
            Efficiency(launch_s=100e-6, overlapped=0.0, runtime_gib=0.43, communicator_gib=0.04, fragmentation=0.05),
        ),
    )
}  # fmt: skip
