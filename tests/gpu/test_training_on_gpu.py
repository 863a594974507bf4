"""The train stage learns on GPUs in bf16 with FSDP2 on NCCL, and options that save memory change no result."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.gpu.device import needs_device, needs_eight_bits, needs_two
from tests.train_stage import logged, make_artifacts, make_config, make_context, run_to_end

pytestmark = needs_device

STEPS = 60


@pytest.fixture(scope="module")
def artifacts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return make_artifacts(tmp_path_factory.mktemp("artifacts"))


def train(
    work: Path, artifacts: dict[str, Path], precision: str, fp8_recipe: str = "tensorwise", **layout: Any
) -> list[dict[str, float]]:
    """Run a train stage and return the metrics of every step."""
    options = {"precision": precision, "fp8_recipe": fp8_recipe, "layout": {"micro_batch_size": 4, **layout}}
    config = make_config(steps=STEPS, learning_rate=3e-3, export_dtype="bfloat16", warmup_steps=5, **options)
    make_context(work, artifacts, config)
    run_to_end(work, config)
    return [row for row in logged(work) if "loss" in row]


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory, artifacts: dict[str, Path]) -> list[dict[str, float]]:
    return train(tmp_path_factory.mktemp("plain") / "work", artifacts, "bf16")


def test_bf16_learns_like_fp32(tmp_path: Path, artifacts: dict[str, Path], plain: list[dict[str, float]]) -> None:
    exact = train(tmp_path / "work", artifacts, "fp32")
    assert plain[0]["loss"] == pytest.approx(exact[0]["loss"], rel=0.01)
    assert plain[-1]["loss"] == pytest.approx(exact[-1]["loss"], rel=0.1)
    assert plain[-1]["loss"] < 0.5 * plain[0]["loss"]
    assert 0 < plain[-1]["peak_memory_gib"] < 4
    weights = load_file(tmp_path / "work" / "model" / "model.safetensors")
    assert {weight.dtype for weight in weights.values()} == {torch.bfloat16}


@pytest.mark.parametrize(
    "layout",
    [
        {"recompute": "full"},
        {"recompute": "selective"},
        {"recompute": "offload"},
        {"cpu_offload": True},
        {"compile": True},
    ],
    ids=["full recomputation", "selective recomputation", "offloaded activations", "offload", "compiled"],
)
def test_memory_choices_do_not_change_what_is_learned(
    tmp_path: Path, artifacts: dict[str, Path], plain: list[dict[str, float]], layout: dict[str, Any]
) -> None:
    other = train(tmp_path / "work", artifacts, "bf16", **layout)
    assert other[0]["loss"] == pytest.approx(plain[0]["loss"], rel=0.01)
    assert other[-1]["loss"] == pytest.approx(plain[-1]["loss"], rel=0.1)


@needs_eight_bits
@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise"])
@pytest.mark.parametrize("layout", [{}, {"compile": True}], ids=["eager", "compiled"])
def test_products_in_8_bits_learn_like_bf16(
    tmp_path: Path, artifacts: dict[str, Path], plain: list[dict[str, float]], recipe: str, layout: dict[str, Any]
) -> None:
    eight = train(tmp_path / "work", artifacts, "fp8", fp8_recipe=recipe, **layout)
    assert eight[0]["loss"] == pytest.approx(plain[0]["loss"], rel=0.02)
    assert eight[-1]["loss"] == pytest.approx(plain[-1]["loss"], rel=0.2)
    assert [row["loss"] for row in eight] != [row["loss"] for row in plain]
    weights = load_file(tmp_path / "work" / "model" / "model.safetensors")
    assert {weight.dtype for weight in weights.values()} == {torch.bfloat16}
    assert "linear layers multiply in 8 bits" in (tmp_path / "work" / "events.jsonl").read_text()


@needs_two
def test_two_devices_learn_what_one_learns(tmp_path: Path, artifacts: dict[str, Path]) -> None:
    one = train(tmp_path / "one", artifacts, "fp32")
    two = train(tmp_path / "two", artifacts, "fp32", dp_shard=2, micro_batch_size=2)
    assert [step["loss"] for step in two[:10]] == pytest.approx([step["loss"] for step in one[:10]], rel=1e-3)
