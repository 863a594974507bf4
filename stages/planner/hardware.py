"""Devices and the links between them: data-sheet numbers, and the few constants that say what is achieved of them.

Built-in descriptions are of common 8-GPU nodes; others come from a YAML file with the same fields. The constants in
`Efficiency` are fitted to published runs by `tests/benchmarks/planner_accuracy.py`.
"""

from __future__ import annotations

import difflib
from dataclasses import MISSING, dataclass, fields, replace
from pathlib import Path
from typing import Any

from stages.core.errors import RecipeError
from stages.parallel.layout import EngineName, Layout
from stages.planner.workload import Precision, Software, our_software


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
    software: tuple[tuple[str, bool | int | float], ...] = ()
    """Fields of `Software` in which what trains here differs from our engines."""

    def software_of(self, engine: EngineName, layout: Layout) -> Software:
        """Of an engine under a layout, as it runs here."""
        changes: dict[str, Any] = dict(self.software)
        return replace(our_software(engine, layout), **changes)

    def peak_flops_per_s(self, precision: Precision) -> float:
        """Dense peak of matrix products; a device without fp8 does them in bf16."""
        tflops = {"bf16": self.bf16_tflops, "fp32": self.fp32_tflops, "fp8": self.fp8_tflops or self.bf16_tflops}
        return tflops[precision] * 1e12

    def sustained_flops_per_s(self, precision: Precision) -> float:
        """The peak that a long run can come near."""
        gain = self.sustained_gain_eight_bits if precision == "fp8" else 1.0
        return gain * self.sustained * self.peak_flops_per_s(precision)


HARDWARE = {
    hardware.name: hardware
    for hardware in (
        Hardware("v100-32gb", 125, 15.7, None, 31.7, 900, 80, 16, 150, 12.5),
        Hardware("a100-40gb", 312, 19.5, None, 39.4, 1555, 108, 8, 300, 25),
        Hardware("a100-80gb", 312, 19.5, None, 79.2, 2039, 108, 8, 300, 25),
        Hardware("a800-80gb", 312, 19.5, None, 79.2, 2039, 108, 8, 200, 25),
        Hardware("h100-80gb", 989, 67, 1979, 79.1, 3350, 132, 8, 450, 50, sustained=0.75),
        Hardware("h200", 989, 67, 1979, 139.8, 4800, 132, 8, 450, 50, sustained=0.77),
        Hardware("h800-80gb", 989, 67, 1979, 79.1, 3350, 132, 8, 200, 50, sustained=0.75),
        Hardware("h20", 148, 44, 296, 95.1, 4000, 78, 8, 450, 50),
        Hardware("b200", 2250, 75, 4500, 178.4, 8000, 148, 8, 900, 50, sustained=0.6, sustained_gain_eight_bits=1.2),
        Hardware("b300", 2250, 75, 4500, 267.7, 8000, 148, 8, 900, 100, sustained=0.6, sustained_gain_eight_bits=1.42),
        Hardware("gb200", 2500, 80, 5000, 184.0, 8000, 152, 72, 900, 50, sustained=0.6, sustained_gain_eight_bits=1.2),
        Hardware(
            "gb300", 2500, 80, 5000, 276.0, 8000, 152, 72, 900, 100, sustained=0.6, sustained_gain_eight_bits=1.42
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
        Hardware("mi300x", 1307, 163, 2615, 191.5, 5300, 304, 8, 448, 50, sustained=0.6, sustained_gain_eight_bits=0.8),
        # By what the vendors say; nothing was measured on them. Of a Max 1550 one of two tiles, which programs see as a
        # device of its own; of an M3 Max the one with 40 cores, and three quarters of 64 GB, which Metal may take.
        Hardware("ascend910b2", 376, 94, None, 61.0, 1600, 24, 8, 28, 25, sustained=0.6),
        Hardware("max-1550", 419, 26, None, 64.0, 1638, 64, 8, 53, 25, sustained=0.6),
        Hardware("m3-max", 28, 14, None, 48.0, 400, 40, 1, 1, 1),
        # A whole machine of two cores; a process without any model holds 0.43 GiB: the interpreter, torch.
        Hardware(
            "cpu",
            0.1,
            0.2,
            None,
            16,
            20,
            2,
            4,
            2,
            1,
            1.0,
            1e-3,
            1e-3,
            True,
            Efficiency(launch_s=100e-6, overlapped=0.0, runtime_gib=0.43, communicator_gib=0.04, fragmentation=0.05),
        ),
    )
}


def built_in(name: str) -> Hardware:
    """The built-in description of this name; RecipeError names those there are."""
    key = name.lower().replace("_", "-").replace(" ", "-")
    if key in HARDWARE:
        return HARDWARE[key]
    close = difflib.get_close_matches(key, HARDWARE, 1)
    hint = f"; did you mean {close[0]}?" if close else ""
    raise RecipeError(
        f"looking for hardware {name!r}: known: {', '.join(HARDWARE)}{hint} (or describe it in a YAML file)"
    )


def load_hardware(name: str, gpus_per_node: int | None = None) -> Hardware:
    """A built-in description by name, or one from a YAML file by path, with this many devices a node."""
    hardware = from_yaml(Path(name)) if name.endswith((".yaml", ".yml")) else built_in(name)
    if gpus_per_node is None:
        return hardware
    if gpus_per_node < 1:
        raise RecipeError(f"GPUs per node is {gpus_per_node}; expected a positive number")
    return replace(hardware, gpus_per_node=gpus_per_node)


def from_yaml(path: Path) -> Hardware:
    """Read a description: `like: NAME` takes what is not given from a built-in one.

    Raises RecipeError for a file that cannot be read, and for unknown, missing and non-positive fields, by name.
    """
    import yaml

    try:
        given = yaml.safe_load(path.read_text())
    except (OSError, yaml.YAMLError) as error:
        raise RecipeError(f"reading hardware from {path}: {error}") from error
    if not isinstance(given, dict):
        raise RecipeError(f"reading hardware from {path}: expected fields with values, as in `bf16_tflops: 989`")
    base = given.pop("like", None)
    start = {f.name: getattr(built_in(base), f.name) for f in fields(Hardware)} if base else {}
    efficiency = _checked(path, Efficiency, given.pop("efficiency", None) or {})
    software = _software(path, given.pop("software", None) or {})
    merged = {**start, "name": path.stem, **_checked(path, Hardware, given)}
    missing = [f.name for f in fields(Hardware) if f.name not in merged and f.default is MISSING]
    if missing:
        raise RecipeError(f"reading hardware from {path}: {', '.join(missing)} missing; or say `like: h100-80gb`")
    hardware = Hardware(**merged)
    software = {**dict(hardware.software), **software}
    return replace(
        hardware, efficiency=replace(hardware.efficiency, **efficiency), software=tuple(sorted(software.items()))
    )


def _software(path: Path, given: Any) -> dict[str, Any]:
    """`given`, if its fields are those of `Software`, each as its default is: true or false, or a number."""
    if not isinstance(given, dict):
        raise RecipeError(f"reading hardware from {path}: software is {given!r}; expected fields with values")
    known = {field.name: field.default for field in fields(Software)}
    for name, value in given.items():
        if name not in known:
            raise RecipeError(f"reading hardware from {path}: unknown software {name!r}; known: {', '.join(known)}")
        is_switch = isinstance(known[name], bool)
        if isinstance(value, bool) != is_switch or not isinstance(value, int | float) or value < 0:
            expected = "true or false" if is_switch else "a number, at least 0"
            raise RecipeError(f"reading hardware from {path}: software.{name} is {value!r}; expected {expected}")
    return given


def _checked(path: Path, kind: type, given: Any) -> dict[str, Any]:
    """`given`, if its fields are those of `kind` and its numbers positive."""
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
    """What a field's value should be, if it is not."""
    if name == "name" or (name in ("fp8_tflops", "price_per_device_hour") and value is None):
        return None
    if name == "host_is_device":
        return None if isinstance(value, bool) else "true or false"
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return None if is_number and value > 0 else "a positive number"


def _number(value: Any) -> Any:
    """YAML takes `8e-6`, without a point, for text."""
    try:
        return float(value) if isinstance(value, str) else value
    except ValueError:
        return value
