"""Check of a machine before the GPU benchmark, in some 20 seconds: driver, versions, APIs, compiler, rates.

Run: `gpu_preflight.py RESULT DEVICE MODELS`.
RESULT has the status `ready`, or `stopped` with the sentence that says what to do; and what was found and measured.
"""

import importlib
import json
import os
import platform
import shutil
import subprocess
import sys
import sysconfig
import time
from collections.abc import Callable, Iterator
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

NEEDED = ("torch", "numpy", "transformers", "tokenizers", "huggingface-hub", "peft", "pydantic", "pytest")
OPTIONAL = ("triton", "torchao", "megatron-core", "fla-core", "flash-linear-attention", "liger-kernel", "trl", "vllm")
OPTIONAL += ("transformer-engine", "matplotlib", "nvidia-ml-py")
OLDEST_TORCH = (2, 11)
MODULES = ("stages.engines.fsdp.engine", "stages.kinds.train.run", "stages.adapters.lora")
"""Modules that import all of torch, Transformers and PEFT that our engine uses."""
MODELS_BYTES = 28e9
"""Free disk that the models with random weights take."""
MEASURE_S = 0.3
"""Seconds for which each rate is measured."""
MOST_USED = 0.05
"""Share of the GPU's memory that other programs may hold before measurements start."""


def main() -> None:
    device = sys.argv[2]
    report: dict[str, Any] = {"versions": dict(_versions()), "machine": _machine(device)}
    # Each check needs what those before it have found in order; the first sentence is reported.
    sentence = next(_problems(report, device), None)
    found = report["machine"] | report["versions"]
    names = ("gpu", "driver", "python", "cores", "compiler", "torch", "triton", "transformers", "peft", "torchao")
    rates = {} if sentence else _rates(device)
    line = ", ".join(f"{name} {found[name]}" for name in names if found.get(name))
    line = "; ".join([line, *(f"{name} {rate:.4g}" for name, rate in rates.items())])
    row = {"status": "stopped" if sentence else "ready", "reason": sentence or line, "rates": rates, **report}
    Path(sys.argv[1]).write_text(json.dumps(row))


def _versions() -> Iterator[tuple[str, str | None]]:
    for name in (*NEEDED, *OPTIONAL):
        try:
            yield name, version(name)
        except PackageNotFoundError:
            yield name, None


def _machine(device: str) -> dict[str, Any]:
    """Return the machine's Python, cores, memory, free disk and C compiler, and what `nvidia-smi` says of the GPU."""
    compiler = next(filter(None, map(shutil.which, filter(None, (os.environ.get("CC"), "gcc", "clang")))), None)
    has_headers = Path(sysconfig.get_paths()["include"], "Python.h").exists()
    machine: dict[str, Any] = {
        "python": platform.python_version(),
        "kernel": platform.release(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30),
        "compiler": compiler and (compiler if has_headers else f"{compiler} without Python.h"),
    }
    if device == "cuda" and (program := shutil.which("nvidia-smi")):
        fields = ("name", "driver_version", "memory.used", "memory.total", "clocks.max.sm", "power.limit")
        query = [program, f"--query-gpu={','.join(fields)}", "--format=csv,noheader,nounits"]
        answer = subprocess.run(query, capture_output=True, text=True, timeout=30)
        lines = (answer.stdout or answer.stderr).strip().splitlines() or [""]
        machine |= {"nvidia_smi": lines, "gpu": lines[0].split(",")[0]}
        machine |= {"driver": (*lines[0].split(", "), "")[1]}
    return machine


def _problems(report: dict[str, Any], device_type: str) -> Iterator[str]:
    """Yield a sentence for each reason why no part can run here, most basic first."""
    missing = [name for name in NEEDED if report["versions"][name] is None]
    if missing:
        yield f"{sys.executable} has no {', '.join(missing)}: take .gpu-kit along, or name another Python (PYTHON=…)"
    if device_type == "cuda" and "nvidia_smi" not in report["machine"]:
        yield "there is no nvidia-smi here, so no NVIDIA GPU: ask for a machine that has one"
    import torch

    if tuple(map(int, torch.__version__.split(".")[:2])) < OLDEST_TORCH:
        yield f"torch {torch.__version__} is older than {'.'.join(map(str, OLDEST_TORCH))}: use another image"
    from stages.core.errors import LifecycleError
    from stages.parallel.accelerator import device_name, device_of_this_process
    from stages.planner.hardware import hardware_at_hand

    try:
        device = device_of_this_process()
    except LifecycleError as error:
        yield str(error)
        return
    if device.type != device_type:
        hidden = f"CUDA_VISIBLE_DEVICES={os.environ.get('CUDA_VISIBLE_DEVICES')!r}"
        why = hidden if torch.version.cuda else "that build has no CUDA"
        yield f"{device_type} was asked for, and torch {torch.__version__} finds {device.type}: {why}"
    if hardware_at_hand(device_name(device), 1, None) is None:
        yield f"the planner does not know {device_name(device)}: describe it in stages/planner/hardware.py"
    try:
        from stages.models.start_up import hide_unused_packages

        hide_unused_packages()
        for name in MODULES:
            importlib.import_module(name)
    except (ImportError, AttributeError) as error:
        yield f"importing our engine fails, an API is missing here ({type(error).__name__}: {error}): fix that first"
    if device.type == "cpu":
        return
    models = Path(sys.argv[3])
    if not models.exists() and (free := shutil.disk_usage(models.parent).free) < MODELS_BYTES:
        yield f"{models.parent} has {free / 1e9:.0f} GB free for models of 28 GB: name another folder (MODELS=…)"
    free, total = torch.cuda.mem_get_info(device)
    report["machine"]["capability"] = torch.cuda.get_device_capability(device)
    used = 1 - free / total
    if used > MOST_USED:
        yield f"{used:.0%} of the GPU's memory is in use by other programs: wait for them, or take another GPU"
    try:
        _first_product(device)
    except RuntimeError as error:
        problem = str(error).splitlines()[0]
        yield f"a first product and attention failed ({problem}): torch does not fit this GPU or its driver"


def _first_product(device: Any) -> None:
    """Multiply in bf16 and attend to two packed documents with a gradient, on the GPU. Raises RuntimeError."""
    import torch
    from torch import nn

    from stages.engines.attention import packed_attention
    from stages.engines.documents import PackedDocuments

    states = [torch.randn(1, heads, 256, 128, device=device, dtype=torch.bfloat16) for heads in (8, 2, 2)]
    states[0].requires_grad_()
    output, _ = packed_attention(nn.Identity(), *states, None, PackedDocuments([200, 56], device))
    (output @ output.mT).sum().backward()
    if not states[0].grad.isfinite().all():
        raise RuntimeError("gradients are not finite")


def _rates(device: str) -> dict[str, float]:
    """Return the device's TFLOP/s of large matrix products, and GB/s of copies, on it and from and to the host."""
    import torch

    side, num_bytes = (512, 2**26) if device == "cpu" else (8192, 2**30)
    rates = {}
    for dtype in (torch.bfloat16, torch.float32):
        left, right = (torch.randn(side, side, device=device).to(dtype) for _ in range(2))
        seconds = _shortest_s(partial(torch.matmul, left, right))
        rates[f"{str(dtype).removeprefix('torch.')} TFLOP/s"] = 2 * side**3 / seconds / 1e12
    source = torch.empty(num_bytes, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    rates["copy GB/s read and written"] = 2 * num_bytes / _shortest_s(lambda: target.copy_(source)) / 1e9
    if device != "cpu":
        on_host = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)
        rates["from the host GB/s"] = num_bytes / _shortest_s(lambda: target.copy_(on_host)) / 1e9
        rates["to the host GB/s"] = num_bytes / _shortest_s(lambda: on_host.copy_(target)) / 1e9
    return rates


def _shortest_s(work: Callable[[], Any]) -> float:
    """Run a function repeatedly for some time, and return the shortest time in seconds."""
    import torch

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
