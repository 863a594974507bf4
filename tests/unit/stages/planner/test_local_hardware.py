"""What a process of this machine runs on: its share of a CPU, or the accelerator of this name."""

import pytest
import torch

from stages.planner.hardware_file import built_in
from stages.planner.local_hardware import cpu_of, hardware_at_hand, has_bf16_units, named_like, shared_cpu


@pytest.mark.parametrize(
    ("device", "name"),
    [
        ("NVIDIA A100-SXM4-80GB", "a100-80gb"),
        ("NVIDIA A100-SXM4-40GB", "a100-40gb"),
        ("NVIDIA H100 80GB HBM3", "h100-80gb"),
        ("NVIDIA H200", "h200"),
        ("NVIDIA B200", "b200"),
        ("NVIDIA L40S", "l40s"),
        ("NVIDIA L4", "l4"),
        ("NVIDIA A10", "a10"),
        ("Tesla T4", "t4"),
        ("NVIDIA GeForce RTX 3090", "rtx-3090"),
        ("NVIDIA GeForce RTX 4090", "rtx-4090"),
        ("NVIDIA GeForce RTX 5090", "rtx-5090"),
    ],
)
def test_devices_are_known_by_their_names(device, name):
    assert named_like(device).name == name


def test_an_unknown_device_is_described_by_nobody():
    assert named_like("Abacus 3000") is None
    assert named_like("NVIDIA RTX A6000") is None
    assert hardware_at_hand("Abacus 3000", 1, None) is None


def test_a_description_on_file_goes_before_the_built_in_ones(tmp_path):
    file = tmp_path / "hardware.yaml"
    file.write_text("like: h200\nbf16_tflops: 500\n")
    assert hardware_at_hand("NVIDIA H200", 8, file).bf16_tflops == 500
    assert hardware_at_hand("NVIDIA H200", 8, tmp_path / "none.yaml").bf16_tflops == built_in("h200").bf16_tflops


def test_processes_share_a_cpu_and_no_more_than_all_of_it():
    machine = cpu_of(8)
    shares = shared_cpu(machine, 4)
    assert 4 * shares.fp32_tflops == pytest.approx(machine.fp32_tflops)
    assert 4 * shares.memory_gib == pytest.approx(machine.memory_gib)
    assert cpu_of(8).fp32_tflops == pytest.approx(2 * cpu_of(4).fp32_tflops)


def test_a_cpu_multiplies_the_dtype_faster_that_it_has_units_for():
    """As `torch` reports the instructions."""
    machine = cpu_of(2)
    assert has_bf16_units() == (torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported())
    assert (machine.bf16_tflops > machine.fp32_tflops) == has_bf16_units()
