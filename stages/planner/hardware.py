"""Device descriptions for the planner: data-sheet peaks, the share that programs achieve, and this machine's hardware.

A device is built in, or described by a YAML file (`lifecycle calibrate` writes one).
`tests/benchmarks/planner_accuracy.py` fits the constants of `Efficiency` to published runs. A CPU is one device that
all processes of the machine share evenly; of accelerators, each process has one.
"""

import difflib
import os
from dataclasses import MISSING, dataclass, fields, replace
from functools import cache
from pathlib import Path
from typing import Any

from stages.core.errors import RecipeError
from stages.planner.workload import PlannedPrecision, ProgramTraits


@dataclass(frozen=True)
class Efficiency:
    """Shares of data-sheet performance that real programs achieve, the same for all devices of a kind."""

    matmul: float = 0.80
    """Share of peak FLOP/s reached by a matrix product that is large in every dimension."""
    matmul_half_waves: float = 1.37
    """Number of output tiles per processor at which a matrix product reaches half of the rate `matmul`."""
    matmul_half_depth: float = 182.0
    """Length of the inner (summed) dimension at which a matrix product reaches half of the rate `matmul`."""
    grouped: float = 0.62
    """Speed of the experts' grouped matrix products, relative to that of dense matrix products."""
    attention: float = 0.5
    """Share of peak FLOP/s reached by a fused attention kernel."""
    attention_in_eight_bits: float = 1.25
    """Rate of fused attention with 8-bit matrix products, relative to 16-bit ones; softmax is in fp32 in both."""
    first_flash_attention: float = 0.303
    """Share of peak FLOP/s reached by the first version of FlashAttention."""
    memory: float = 0.743
    """Share of peak memory bandwidth reached by kernels that stream through memory."""
    intra_link: float = 0.831
    """Share of the bandwidth within a node that collectives reach."""
    inter_link: float = 0.7
    """Share of the bandwidth between nodes that collectives reach."""
    overlapped: float = 0.485
    """Share of communication hidden by compute that runs at the same time."""
    launch_s: float = 32.6e-6
    """Host seconds to launch one kernel from an eager program."""
    runtime_gib: float = 1.5
    """GiB of device memory held by the driver and libraries."""
    communicator_gib: float = 1.0
    """GiB of device memory held by the communication buffers of each process group."""
    fragmentation: float = 0.15
    """Memory lost in gaps, as a fraction of that allocated and freed within a training step."""
    streams: float = 1.0
    """Share of the idle memory of FSDP2's streams that no other stream can use; 0 where streams share memory."""


@dataclass(frozen=True)
class Hardware:
    """Cluster of identical devices as the planner models it: compute rates, memory and links."""

    name: str
    bf16_tflops: float
    fp32_tflops: float
    fp8_tflops: float | None
    memory_gib: float
    memory_gb_per_s: float
    num_processors: int
    """Number of streaming multiprocessors (NVIDIA), compute units (AMD) or cores (CPU) of a device."""
    gpus_per_node: int
    intra_node_gb_per_s: float
    """Bandwidth in GB/s from one device to the others of its node, in one direction."""
    inter_node_gb_per_s: float
    """Bandwidth in GB/s between nodes for each device, in one direction: its share of the node's network."""
    sustained: float = 1.0
    """Share of peak FLOP/s that power limit and clocks allow in a long run; 1 stands for the share of an A100."""
    intra_node_latency_s: float = 8e-6
    """Seconds of latency of one collective within a node."""
    inter_node_latency_s: float = 20e-6
    host_is_device: bool = False
    """True if one processor launches and runs kernels, as on a CPU: their times then add up."""
    efficiency: Efficiency = Efficiency()
    sustained_gain_eight_bits: float = 1.0
    """Factor on `sustained` for 8-bit matrix products, which draw less power."""
    price_per_device_hour: float | None = None
    """Price of one device hour in any currency, from which reports compute the cost of a refresh; None: unknown."""
    fp4_tflops: float | None = None
    host_gb_per_s: float = 25.0
    """Bandwidth in GB/s between a device and its host, in one direction: PCIe 4 has 25, PCIe 5 50, Grace more."""
    host_memory_gib: float | None = None
    """Host memory of a node in GiB, which offloading may take; None: unknown, so that nothing is compared with it."""
    compiles: bool = True
    """False if torch.compile makes no kernels for the device."""
    software: tuple[tuple[str, bool | int | float], ...] = ()
    """Exceptions of the training program's behaviour here: pairs of a field of `ProgramTraits` and its value."""

    def habits(self, software: ProgramTraits) -> ProgramTraits:
        """Return a training program's behaviour (fused kernels, …) with this hardware's exceptions applied."""
        changes: dict[str, Any] = dict(self.software)
        return replace(software, **changes) if changes else software

    def peak_flops_per_s(self, precision: PlannedPrecision) -> float:
        """Return the peak FLOP/s of dense matrix products; without fp4 those of fp8, without fp8 of bf16."""
        eight_bits = self.fp8_tflops or self.bf16_tflops
        tflops = {
            "fp32": self.fp32_tflops,
            "bf16": self.bf16_tflops,
            "fp8": eight_bits,
            "fp4": self.fp4_tflops or eight_bits,
        }
        return tflops[precision] * 1e12

    def sustained_flops_per_s(self, precision: PlannedPrecision) -> float:
        """Return the FLOP/s of dense matrix products in a precision that power and clocks sustain in a long run."""
        gain = self.sustained_gain_eight_bits if precision in ("fp8", "fp4") else 1.0
        return gain * self.sustained * self.peak_flops_per_s(precision)


OPTIONAL = ("fp8_tflops", "fp4_tflops", "price_per_device_hour", "host_memory_gib")
"""Fields that may be `null`: a device has no such precision; its price, or its host's memory, is not known."""
PCIE_5_GB_PER_S = 50
NVLINK_C2C_GB_PER_S = 450
"""Bandwidth in GB/s between a Blackwell GPU and the Grace CPU of its module."""

EIGHT_LARGE_GPUS = ("a100-80gb", "a800-80gb", "h100-80gb", "h800-80gb", "h200", "h20", "b200", "b300", "mi300x")
HOST_MEMORY_GIB = {**dict.fromkeys(EIGHT_LARGE_GPUS, 2048.0), **dict.fromkeys(("gb200", "gb300"), 36 * 447.0)}
"""Host memory of a node in GiB: 2 TiB, as DGX systems and most nodes of cloud providers have; a rack's 36 Grace CPUs of
480 GB. Other nodes vary."""

HARDWARE = {
    hardware.name: replace(hardware, host_memory_gib=HOST_MEMORY_GIB.get(hardware.name))
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
        # The same chip at 750 and at 1,000 W, its successor at 1,000 and 1,400 W: sustained rates follow the power.
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
        # By the vendors' data sheets; nothing was measured. max-1550: one of its two tiles, which programs see as a
        # device of its own. m3-max: with 40 cores, and three quarters of its 64 GB, the share that Metal may take.
        Hardware("ascend910b2", 376, 94, None, 61.0, 1600, 24, 8, 28, 25, sustained=0.6, compiles=False),
        Hardware("max-1550", 419, 26, None, 64.0, 1638, 64, 8, 53, 25, sustained=0.6),
        Hardware("m3-max", 28, 14, None, 48.0, 400, 40, 1, 1, 1),
        # A whole machine of two cores; a process without any model holds 0.43 GiB: the interpreter, torch. Its shares
        # of products and memory are its own, as the others are fitted to runs on GPUs.
        Hardware(
            "cpu", 0.1, 0.2, None, 16, 20, 2, 4, 2, 1, 1.0, 1e-3, 1e-3, True,
            Efficiency(
                matmul_half_waves=1.125, matmul_half_depth=109.0, memory=0.93, intra_link=0.765, launch_s=100e-6,
                overlapped=0.0, runtime_gib=0.43, communicator_gib=0.04, fragmentation=0.05, streams=0,
            ),
        ),
    )
}  # fmt: skip


def built_in(name: str) -> Hardware:
    """Return a built-in description of a device; raise RecipeError that lists the known names."""
    # `H100 80GB`, `h100_80gb` -> h100-80gb
    key = name.lower().replace("_", "-").replace(" ", "-")
    if key in HARDWARE:
        return HARDWARE[key]
    close = difflib.get_close_matches(key, HARDWARE, 1)
    hint = f"; did you mean {close[0]}?" if close else ""
    raise RecipeError(
        f"looking for hardware {name!r}: known: {', '.join(HARDWARE)}{hint} (or describe it in a YAML file)"
    )


def load_hardware(name: str, gpus_per_node: int | None = None) -> Hardware:
    """Return a built-in device, or a YAML file's (`*.yaml`), with `gpus_per_node` devices per node if given."""
    hardware = from_yaml(Path(name)) if name.endswith((".yaml", ".yml")) else built_in(name)
    if gpus_per_node is None:
        return hardware
    if gpus_per_node < 1:
        raise RecipeError(f"GPUs per node is {gpus_per_node}; expected a positive number")
    return replace(hardware, gpus_per_node=gpus_per_node)


def from_yaml(path: Path) -> Hardware:
    """Read a device description from a YAML file; `like: NAME` takes missing fields from a built-in device.

    Raises RecipeError for a file that cannot be read, and for unknown, missing and non-positive fields, by name.
    """
    import yaml

    try:
        given = yaml.safe_load(path.read_text())
    except (OSError, UnicodeDecodeError, RecursionError, yaml.YAMLError) as error:
        raise RecipeError(f"reading hardware from {path}: {error}") from error
    if not isinstance(given, dict):
        raise RecipeError(f"reading hardware from {path}: expected fields with values, as in `bf16_tflops: 989`")
    # The three blocks are taken out first, so that the rest are fields of `Hardware`.
    base = given.pop("like", None)
    if not isinstance(base, str | None):
        raise RecipeError(f"reading hardware from {path}: like is {base!r}; expected the name of a device, h100-80gb")
    start = {f.name: getattr(built_in(base), f.name) for f in fields(Hardware)} if base else {}
    efficiency = _checked(path, Efficiency, given.pop("efficiency", None) or {})
    software = _software(path, given.pop("software", None) or {})
    # Without a `name` of its own, a file's device is named like the file, not like the device that it starts from.
    merged = {**start, "name": path.stem, **_checked(path, Hardware, given)}
    missing = [f.name for f in fields(Hardware) if f.name not in merged and f.default is MISSING]
    if missing:
        raise RecipeError(f"reading hardware from {path}: {', '.join(missing)} missing; or say `like: h100-80gb`")
    hardware = Hardware(**merged)
    # Fields in the file replace single ones of the base device, not its whole block.
    software = {**dict(hardware.software), **software}
    return replace(
        hardware, efficiency=replace(hardware.efficiency, **efficiency), software=tuple(sorted(software.items()))
    )


def _software(path: Path, given: Any) -> dict[str, Any]:
    """Check the `software` block of a hardware file: its keys and the types of its values. Returns it unchanged."""
    if not isinstance(given, dict):
        raise RecipeError(f"reading hardware from {path}: software is {given!r}; expected fields with values")
    known = {field.name: field.default for field in fields(ProgramTraits)}
    for name, value in given.items():
        if name not in known:
            raise RecipeError(f"reading hardware from {path}: unknown software {name!r}; known: {', '.join(known)}")
        is_switch = isinstance(known[name], bool)
        # In Python True is an int too, so a switch and a number are distinguished first.
        if isinstance(value, bool) != is_switch or not isinstance(value, int | float) or value < 0:
            expected = "true or false" if is_switch else "a number, at least 0"
            raise RecipeError(f"reading hardware from {path}: software.{name} is {value!r}; expected {expected}")
    return given


def _checked(path: Path, kind: type, given: Any) -> dict[str, Any]:
    """Return a hardware file's fields, all known to the dataclass `kind`, and all numbers positive."""
    if not isinstance(given, dict):
        raise RecipeError(f"reading hardware from {path}: expected fields of {kind.__name__}, found {given!r}")
    known = [field.name for field in fields(kind)]
    given = {name: _number(value) for name, value in given.items()}
    for name, value in given.items():
        if name not in known:
            raise RecipeError(f"reading hardware from {path}: unknown field {name!r}; known: {', '.join(known)}")
        if expected := _lacks(name, value):
            raise RecipeError(f"reading hardware from {path}: {name} is {value!r}; expected {expected}")
    return given


def _lacks(name: str, value: Any) -> str | None:
    """Return what a hardware field should contain (such as "a positive number"), or None if its value is valid."""
    if name == "name" or (name in OPTIONAL and value is None):
        return None
    if name in ("host_is_device", "compiles"):
        return None if isinstance(value, bool) else "true or false"
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return None if is_number and value > 0 else "a positive number"


def _number(value: Any) -> Any:
    """Convert a number that YAML reads as text, such as `8e-6` (without a point); return other values unchanged."""
    try:
        return float(value) if isinstance(value, str) else value
    except ValueError:
        return value


BF16_FEATURES = frozenset({"avx512_bf16", "amx_bf16", "bf16"})
"""CPU flags in `/proc/cpuinfo` that announce bf16 instructions: the first two on x86, the last one on ARM."""
BF16_UNITS_GAIN = 4.0
"""Speed of bf16 products over fp32 on a CPU with AVX512-BF16, measured on two cores (0.80 and 0.21 TFLOP/s)."""


def hardware_at_hand(device_name: str | None, processes: int, file: Path | None) -> Hardware | None:
    """Return a description of this machine's devices for the planner; None for an accelerator without one.

    Without an accelerator, each of the `processes` gets an equal share of the CPU. device_name: None on a CPU. file:
    the YAML description, if it exists; raises RecipeError when it cannot be read.
    """
    if file and file.is_file():
        hardware: Hardware | None = from_yaml(file)
    else:
        hardware = named_like(device_name) if device_name else cpu_of(len(os.sched_getaffinity(0)))
    return shared_cpu(hardware, processes) if hardware and device_name is None else hardware


def named_like(device_name: str) -> Hardware | None:
    """Return the built-in device that an accelerator's name (`NVIDIA A100-SXM4-80GB`) contains, or None."""
    words = device_name.lower().replace("-", " ").replace("_", " ").split()
    # {nvidia, a100, sxm4, 80gb} holds {a100, 80gb}
    known = [name for name in HARDWARE if set(name.split("-")) <= set(words)]
    # The longest is the most specific of several.
    return HARDWARE[max(known, key=len)] if known else None


def cpu_of(num_cores: int) -> Hardware:
    """Return the built-in CPU description scaled to `num_cores`, with the bf16 speed of this machine."""
    cpu = built_in("cpu")
    factor = num_cores / cpu.num_processors
    bf16_tflops = BF16_UNITS_GAIN * cpu.fp32_tflops if has_bf16_units() else cpu.bf16_tflops
    return replace(
        cpu, bf16_tflops=factor * bf16_tflops, fp32_tflops=factor * cpu.fp32_tflops, num_processors=num_cores
    )


@cache
def has_bf16_units() -> bool:
    """Return whether this machine's CPU has bf16 instructions, according to `/proc/cpuinfo`."""
    about = Path("/proc/cpuinfo")
    lines = about.read_text().splitlines() if about.is_file() else []
    features = (line.partition(":")[2].split() for line in lines if line.startswith(("flags", "Features")))
    # The first core stands for all of them; () where there is no such file, as on macOS.
    return not BF16_FEATURES.isdisjoint(next(features, ()))


def shared_cpu(machine: Hardware, processes: int) -> Hardware:
    """Return the equal share that each of `processes` has of a machine without accelerators, as a `Hardware`."""
    return replace(
        machine,
        bf16_tflops=machine.bf16_tflops / processes,
        fp32_tflops=machine.fp32_tflops / processes,
        memory_gib=machine.memory_gib / processes,
        memory_gb_per_s=machine.memory_gb_per_s / processes,
        num_processors=max(1, machine.num_processors // processes),
        # A process is a device here, and all of them are one node.
        gpus_per_node=processes,
    )
