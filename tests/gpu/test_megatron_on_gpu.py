"""Megatron on GPUs has the same losses as FSDP2, in fp32 and bf16, on one device and on two with NCCL."""

from pathlib import Path
from typing import Any

import pytest

from tests.gpu.device import needs_device, needs_two
from tests.train_stage import logged, make_artifacts, make_config, make_context, run_to_end

pytestmark = needs_device

STEPS = 40


@pytest.fixture(scope="module")
def artifacts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return make_artifacts(tmp_path_factory.mktemp("artifacts"))


def train(work: Path, artifacts: dict[str, Path], engine: str, precision: str, **layout: Any) -> list[float]:
    """Run a train stage and return the losses of all steps."""
    config = make_config(
        engine=engine,
        steps=STEPS,
        warmup_steps=5,
        learning_rate=3e-3,
        precision=precision,
        layout={"micro_batch_size": 4, **layout},
    )
    make_context(work, artifacts, config)
    run_to_end(work, config)
    return [row["loss"] for row in logged(work) if "loss" in row]


@pytest.fixture(scope="module", params=["fp32", "bf16"])
def expected(request, tmp_path_factory, artifacts) -> tuple[str, list[float]]:
    """Provide a precision, and losses of the FSDP engine in it on one device, which Megatron must match."""
    return request.param, train(tmp_path_factory.mktemp("fsdp") / "work", artifacts, "fsdp", request.param)


def assert_alike(losses: list[float], expected: tuple[str, list[float]]) -> None:
    precision, others = expected
    tolerance = {"fp32": 1e-3, "bf16": 1e-2}[precision]
    assert losses[0] == pytest.approx(others[0], rel=tolerance)
    assert losses[-1] == pytest.approx(others[-1], rel=10 * tolerance)
    assert losses[-1] < 0.6 * losses[0]


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
def test_one_device_learns_what_fsdp_learns(tmp_path, artifacts, expected, recompute) -> None:
    assert_alike(train(tmp_path / "work", artifacts, "megatron", expected[0], recompute=recompute), expected)


@needs_two
@pytest.mark.parametrize(
    "layout",
    [
        {"tp": 2, "sequence_parallel": True},
        {"pp": 2, "micro_batch_size": 1},
        {"cp": 2},
        {"dp_shard": 2, "micro_batch_size": 2},
    ],
    ids=["tensors", "pipeline", "context", "data"],
)
def test_two_devices_learn_what_fsdp_learns_on_one(tmp_path, artifacts, expected, layout) -> None:
    assert_alike(train(tmp_path / "work", artifacts, "megatron", expected[0], **layout), expected)
