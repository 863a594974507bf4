"""A device by name, or from a YAML file: what `--gpu` takes."""

from __future__ import annotations

import difflib
from dataclasses import MISSING, fields, replace
from pathlib import Path
from typing import Any

from stages.core.errors import RecipeError
from stages.planner.devices import HARDWARE
from stages.planner.hardware import Efficiency, Hardware
from stages.planner.workload import Software


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
    if name == "name" or (name in ("fp8_tflops", "fp4_tflops", "price_per_device_hour") and value is None):
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
