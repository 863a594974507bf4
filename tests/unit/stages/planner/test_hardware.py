"""Hardware for the planner comes from a built-in list, YAML files or this machine; mistakes in it are reported."""

import json
from dataclasses import fields, replace

import pytest
import torch

from stages.core.errors import RecipeError
from stages.models.known_models import KNOWN
from stages.parallel.layout import Layout
from stages.planner.costs import SearchRequest
from stages.planner.engines.registry import COSTS
from stages.planner.hardware import (
    HARDWARE,
    Hardware,
    built_in,
    cpu_of,
    from_yaml,
    hardware_at_hand,
    has_bf16_units,
    load_hardware,
    named_like,
    shared_cpu,
)
from stages.planner.search import estimate
from stages.planner.time import step_time
from stages.planner.workload import Workload


def test_issue_s_devices_are_built_in():
    assert {"a100-40gb", "a100-80gb", "h100-80gb", "h200", "b200", "l40s", "mi300x", "cpu"} <= set(HARDWARE)


def test_unknown_device_names_those_known_and_the_closest():
    with pytest.raises(RecipeError, match=r"'h100-80'.*a100-40gb.*did you mean h100-80gb"):
        built_in("h100-80")


def test_yaml_takes_from_a_built_in_what_it_does_not_say(tmp_path):
    file = tmp_path / "ours.yaml"
    file.write_text("like: h100-80gb\ninter_node_gb_per_s: 12.5\nefficiency: {matmul: 0.7}\n")
    ours = load_hardware(str(file), gpus_per_node=4)
    assert (ours.name, ours.gpus_per_node, ours.inter_node_gb_per_s) == ("ours", 4, 12.5)
    assert ours.efficiency.matmul == 0.7
    assert ours.efficiency.memory == HARDWARE["h100-80gb"].efficiency.memory


def test_yaml_says_in_what_the_software_differs_from_our_engines(tmp_path):
    file, layout = tmp_path / "ours.yaml", Layout(dp_shard=8)
    file.write_text("like: h100-80gb\nsoftware: {gradient_bytes: 2, cuda_graphs: true, overlaps_gradients: false}\n")
    ours, usual = from_yaml(file), HARDWARE["h100-80gb"]
    assert COSTS["fsdp"].program(layout, ours) == replace(
        COSTS["fsdp"].software, gradient_bytes=2, cuda_graphs=True, overlaps_gradients=False
    )
    assert COSTS["megatron"].program(layout, usual) == COSTS["megatron"].software
    llama, work = KNOWN["llama3 8b"], Workload(4096, 64)
    for part, is_more in (("compute", False), ("data_parallel", True)):
        changed, before = (
            getattr(step_time(llama, "megatron", layout, work, hardware).parts, part) for hardware in (ours, usual)
        )
        assert (changed > before) == is_more and changed != before
    changed, before = (
        estimate(SearchRequest(llama, work, one, 8), "megatron", layout).memory.worst.gradients for one in (ours, usual)
    )
    assert changed == before / 2


def test_yaml_may_say_everything_itself(tmp_path):
    h200 = HARDWARE["h200"]
    lines = [
        f"{one.name}: {json.dumps(getattr(h200, one.name))}"
        for one in fields(Hardware)
        if one.name not in ("efficiency", "software")
    ]
    (tmp_path / "all.yaml").write_text("\n".join(lines))
    assert from_yaml(tmp_path / "all.yaml") == h200


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("like: h100-80gb\nbandwidth: 3", "unknown field 'bandwidth'"),
        ("like: h100-80gb\nmemory_gib: 0", "memory_gib is 0"),
        ("like: h100-80gb\nmemory_gib: much", "memory_gib is 'much'"),
        ("like: h100-80gb\nefficiency: {matmul: -1}", "matmul is -1"),
        ("like: h100-80gb\nsoftware: fast", "software is 'fast'"),
        ("like: h100-80gb\nsoftware: {overlap: true}", "unknown software 'overlap'; known: .*overlaps_layers"),
        ("like: h100-80gb\nsoftware: {overlaps_layers: 1}", "software.overlaps_layers is 1; expected true or false"),
        ("like: h100-80gb\nsoftware: {gradient_bytes: true}", "software.gradient_bytes is True; expected a number"),
        ("bf16_tflops: 100", "memory_gib.*missing"),
        ("like: h1000", "did you mean h100-80gb|known:"),
        ("- a list", "expected fields with values"),
        ("a: [", "reading hardware"),
    ],
)
def test_what_is_wrong_with_a_description_is_named(tmp_path, text, words):
    file = tmp_path / "bad.yaml"
    file.write_text(text)
    with pytest.raises(RecipeError, match=words):
        from_yaml(file)


@pytest.mark.parametrize("count", [0, -8])
def test_gpus_of_a_node_must_be_positive(count):
    with pytest.raises(RecipeError, match=str(count)):
        load_hardware("h200", count)


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
    """A CPU is planned to be faster in bf16 if it has bf16 instructions, which `torch` reports."""
    machine = cpu_of(2)
    assert has_bf16_units() == (torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported())
    assert (machine.bf16_tflops > machine.fp32_tflops) == has_bf16_units()
