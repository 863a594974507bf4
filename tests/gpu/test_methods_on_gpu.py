"""Adapters, preference methods and pictures are learned on an accelerator: losses fall, the first preference loss is
log 2, and pictures give the losses of a CPU.
"""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from stages.engines.fsdp.engine import FsdpEngine
from stages.engines.settings import AdamSettings, EngineSettings, MediaSettings
from stages.kinds.train.methods.sft import SftLoss
from stages.models.facts import ModelFacts
from stages.parallel.layout import Layout
from stages.parallel.processes import joined_processes
from tests.gpu.device import DEVICE, needs_device
from tests.train_stage import logged, make_artifacts, make_config, make_context, run_to_end

pytestmark = needs_device

LAYOUT = {"micro_batch_size": 4}
ENGINES = ("fsdp", "megatron")


@pytest.fixture(scope="module")
def artifacts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return make_artifacts(tmp_path_factory.mktemp("artifacts"))


def train(work: Path, artifacts: dict[str, Path], method: str = "sft", **fields: Any) -> list[dict[str, float]]:
    """Run a train stage and return the metrics of every step."""
    config = make_config(method, **{"precision": "bf16", "layout": LAYOUT, **fields})
    make_context(work, artifacts, config)
    run_to_end(work, config)
    return logged(work)


def losses(steps: list[dict[str, float]]) -> list[float]:
    return [step["loss"] for step in steps if "loss" in step]


@pytest.fixture(scope="module")
def adapted(
    tmp_path_factory: pytest.TempPathFactory, artifacts: dict[str, Path]
) -> dict[str, tuple[Path, list[float]]]:
    """Provide the work folder and the losses of a training of an adapter, for each engine."""
    found = {}
    for engine in ENGINES:
        work = tmp_path_factory.mktemp(engine) / "work"
        adapter = {"rank": 8, "alpha": 16}
        found[engine] = (
            work,
            losses(train(work, artifacts, steps=30, learning_rate=1e-2, engine=engine, adapter=adapter)),
        )
    return found


def test_an_adapter_learns_alike_on_both_engines(adapted: dict[str, tuple[Path, list[float]]]) -> None:
    of_fsdp, of_megatron = (adapted[engine][1] for engine in ENGINES)
    assert of_megatron[0] == pytest.approx(of_fsdp[0], rel=0.01)
    assert of_megatron[-1] == pytest.approx(of_fsdp[-1], rel=0.1)
    assert of_fsdp[-1] < 0.8 * of_fsdp[0]


@pytest.mark.parametrize("engine", ENGINES)
def test_an_adapter_is_written_as_peft_has_it(adapted: dict[str, tuple[Path, list[float]]], engine: str) -> None:
    weights = load_file(adapted[engine][0] / "adapter" / "adapter_model.safetensors")
    factors = {name.split(".lora_")[1][0] for name in weights}
    assert factors == {"A", "B"}
    assert all(torch.isfinite(weight).all() and weight.any() for weight in weights.values())


@pytest.mark.parametrize("base_precision", ["nf4", "int8"])
def test_an_adapter_learns_beside_a_model_in_few_bits(
    tmp_path: Path, artifacts: dict[str, Path], adapted: dict[str, tuple[Path, list[float]]], base_precision: str
) -> None:
    adapter = {"rank": 8, "alpha": 16, "base_precision": base_precision}
    found = losses(train(tmp_path / "work", artifacts, steps=30, learning_rate=1e-2, adapter=adapter))
    plain = adapted["fsdp"][1]
    assert found[0] == pytest.approx(plain[0], rel=0.1)
    assert found[-1] < 0.8 * found[0]


@pytest.mark.parametrize("engine", ENGINES)
def test_preferences_begin_at_ln_2_and_are_learned(tmp_path: Path, artifacts: dict[str, Path], engine: str) -> None:
    found = losses(train(tmp_path / "work", artifacts, "dpo", steps=12, engine=engine))
    assert found[0] == pytest.approx(math.log(2), abs=2e-3)
    assert found[-1] < found[0] - 0.02


@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl", "gemma3"])
def test_documents_with_pictures_give_the_losses_of_a_cpu(tmp_path: Path, family: str) -> None:
    for package in ("PIL", "torchvision"):
        pytest.importorskip(package)
    from tests.zoo.pictures import Documents, save_family

    documents = Documents(save_family(family, tmp_path))
    found = {}
    with joined_processes():
        for device, precision in ((torch.device("cpu"), "fp32"), (DEVICE, "bf16")):
            settings = EngineSettings(Layout(), precision, AdamSettings(1e-3), media=MediaSettings())
            engine = FsdpEngine(ModelFacts(tmp_path), settings, device)
            steps = [engine.train_step([documents.batch()], SftLoss(), 1e-3, None) for _ in range(3)]
            found[precision] = [steps[0].grad_norm, *(step.loss for step in steps)]
            engine.close()
    assert found["bf16"] == pytest.approx(found["fp32"], rel=0.03)
    assert found["bf16"][-1] < found["bf16"][1]
