"""Peak FLOP/s are looked up by the device name that the driver reports; a CPU's are measured."""

import json
import os
import subprocess
import sys
import time

import pytest
import torch

from stages.parallel.accelerator import device_of_this_process
from stages.parallel.devices import best_matmul_rate, data_sheet_peak, device_peak


@pytest.mark.parametrize(
    ("device_name", "tflops"),
    [
        ("NVIDIA H100 80GB HBM3", 989),
        ("NVIDIA H100 PCIe", 756),
        ("NVIDIA H100 NVL", 835),
        ("NVIDIA H200", 989),
        ("NVIDIA A100-SXM4-80GB", 312),
        ("NVIDIA B200", 2250),
        ("NVIDIA GB200", 2500),
        ("NVIDIA L40S", 362),
        ("NVIDIA L4", 121),
        ("AMD Instinct MI300X", 1307),
        ("NVIDIA GeForce RTX 4090", 165),
    ],
)
def test_dense_half_precision_peak_by_name(device_name: str, tflops: float) -> None:
    assert data_sheet_peak(device_name, torch.bfloat16) == pytest.approx(tflops * 1e12)


def test_single_precision_with_and_without_tf32() -> None:
    assert data_sheet_peak("NVIDIA A100-SXM4-40GB", torch.float32) == pytest.approx(19.5e12)
    assert data_sheet_peak("NVIDIA A100-SXM4-40GB", torch.float32, tf32=True) == pytest.approx(156e12)


def test_an_unknown_accelerator_has_no_peak() -> None:
    assert data_sheet_peak("NVIDIA T1000", torch.bfloat16) is None


def test_the_rate_of_a_cpu_is_measured_and_says_so() -> None:
    peak = device_peak(torch.device("cpu"), torch.float32)
    assert peak is not None
    assert peak.source == "measured"
    start = time.perf_counter()
    torch.ones(128, 128) @ torch.ones(128, 128)
    rate_of_one_product = 2 * 128**3 / (time.perf_counter() - start)
    assert peak.flops_per_s > 0.1 * rate_of_one_product


@pytest.mark.parametrize("damage", [None, "{"])
def test_the_best_rate_of_a_machine_is_kept(tmp_path, monkeypatch, damage) -> None:
    monkeypatch.setenv("LIFECYCLE_HOME", str(tmp_path))
    first = best_matmul_rate(torch.float32)
    (kept,) = tmp_path.glob("cache/matmul-rates.json")
    ((key, rate),) = json.loads(kept.read_text()).items()
    assert rate == first and f"{torch.get_num_threads()} threads, float32" in key

    kept.write_text(json.dumps({key: 1e18, "of another machine": 1}) if damage is None else damage)
    again = best_matmul_rate(torch.float32)
    assert (again == 1e18) == (damage is None)
    assert json.loads(kept.read_text())[key] == again
    best_matmul_rate(torch.bfloat16)
    assert len(json.loads(kept.read_text())) == (3 if damage is None else 2)


def test_processes_that_measure_at_the_same_time_keep_each_others_rates(tmp_path) -> None:
    program = (
        "import os, torch; from stages.parallel.devices import best_matmul_rate\n"
        "torch.set_num_threads(1 if os.fork() else 2); print(best_matmul_rate(torch.float32), flush=True)"
    )
    environment = {**os.environ, "LIFECYCLE_HOME": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", program], env=environment, stdout=subprocess.PIPE, text=True)
    rates = [float(rate) for rate in done.stdout.split()]
    assert len(rates) == 2
    assert sorted(json.loads((tmp_path / "cache" / "matmul-rates.json").read_text()).values()) == sorted(rates)


def test_a_cpu_without_units_for_bf16_has_the_peak_of_the_way_it_takes_instead() -> None:
    program = (
        "import torch; from stages.parallel.devices import device_peak, measured_matmul_rate as rate\n"
        "torch.set_num_threads(1)\n"
        "peak = device_peak(torch.device('cpu'), torch.bfloat16).flops_per_s\n"
        "print(peak / rate(torch.float32), peak / rate(torch.bfloat16))"
    )
    environment = {**os.environ, "ONEDNN_MAX_CPU_ISA": "AVX2", "ATEN_CPU_CAPABILITY": "avx2"}
    result = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True
    )
    of_fp32, of_bf16 = map(float, result.stdout.split())
    assert of_fp32 > 0.5  # measured twice, on a machine that others use
    assert of_bf16 > 0.5


def test_convolutions_in_fp32_are_as_exact_as_matrix_products() -> None:
    device_of_this_process()
    assert torch.get_float32_matmul_precision() == "highest" and not torch.backends.cudnn.allow_tf32
