"""Descriptions of hardware: built in, from YAML, and what is wrong with them."""

from __future__ import annotations

from dataclasses import fields

import pytest

from stages.core.errors import RecipeError
from stages.planner.hardware import HARDWARE, Hardware, built_in, from_yaml, load_hardware


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


def test_yaml_may_say_everything_itself(tmp_path):
    h200 = HARDWARE["h200"]
    lines = [f"{one.name}: {getattr(h200, one.name)}" for one in fields(Hardware) if one.name != "efficiency"]
    (tmp_path / "all.yaml").write_text("\n".join(lines))
    assert from_yaml(tmp_path / "all.yaml") == h200


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("like: h100-80gb\nbandwidth: 3", "unknown field 'bandwidth'"),
        ("like: h100-80gb\nmemory_gib: 0", "memory_gib is 0"),
        ("like: h100-80gb\nmemory_gib: much", "memory_gib is 'much'"),
        ("like: h100-80gb\nefficiency: {matmul: -1}", "matmul is -1"),
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
