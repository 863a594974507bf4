"""8-bit training by torchao, emulated on a CPU, gives losses close to bf16's, but not equal ones."""

import importlib.util
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from transformers import MixtralConfig, MixtralForCausalLM, Qwen3Config, Qwen3ForCausalLM

from stages.adapters.config import AdapterConfig
from stages.adapters.lora import add_adapter
from stages.core.errors import ModelError, ResourceError
from stages.engines.fsdp import engine as fsdp_engine
from stages.engines.fsdp.eight_bits import float8_config, float8_exclusions, multiply_in_eight_bits
from stages.engines.fsdp.engine import FsdpEngine
from stages.engines.settings import AdamSettings, EngineSettings
from stages.kinds.train.methods.sft import SftLoss
from stages.models.facts import ModelFacts
from stages.parallel.engines import fsdp
from stages.parallel.layout import Layout
from stages.parallel.processes import joined_processes
from tests.parity.fsdp_program import pack

needs_torchao = pytest.mark.skipif(
    importlib.util.find_spec("torchao") is None, reason="torchao is not installed: `make .venv/.test-ready`"
)
SIZES: dict[str, Any] = {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 96,
}  # fmt: skip
STEPS, LEARNING_RATE = 4, 2e-3
BF16_AND_8_BITS = (1e-5, 0.01)
"""Smallest and largest loss difference of bf16 and 8 bits (three bits of mantissa), in nats."""
ROWS = [pack([[[(seed + 7 * place * place) % 96 for place in range(37)]]]) for seed in (1, 2)]
"""Training rows of 37 tokens, a length that is no multiple of 16."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    found = tmp_path_factory.mktemp("model")
    Qwen3ForCausalLM(Qwen3Config(**SIZES, head_dim=16, tie_word_embeddings=False)).save_pretrained(found)
    return found


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Iterator[torch.device]:
    """Provide a CPU that emulates torchao's 8-bit products: operands cast to 8 bits, multiplied in fp32."""
    monkeypatch.setattr(fsdp_engine, "float8_config", lambda recipe: replace(float8_config(recipe), emulate=True))
    with joined_processes() as found:
        yield found


def trained(engine: FsdpEngine, steps: int = STEPS) -> list[float]:
    return [engine.train_step(ROWS, SftLoss(), LEARNING_RATE, 1.0).loss for _ in range(steps)]


def settings(precision: str, **options: Any) -> EngineSettings:
    return EngineSettings(Layout(**options.pop("layout", {})), precision, AdamSettings(LEARNING_RATE), **options)


@needs_torchao
@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise"])
def test_losses_are_near_those_of_bf16_but_not_the_same(folder: Path, device: torch.device, recipe: str) -> None:
    plain = trained(FsdpEngine(ModelFacts(folder), settings("bf16"), device))
    engine = FsdpEngine(ModelFacts(folder), settings("fp8", fp8_recipe=recipe), device)
    gradients: dict[str, float] = {}
    engine._optimizer.register_step_pre_hook(
        lambda *_: gradients.update({name: one.grad.norm().item() for name, one in engine._model.named_parameters()})
    )
    found = trained(engine)
    assert engine.note and engine.note.startswith("14 linear layers multiply in 8 bits")
    assert engine.note.endswith("left in bf16: 1 head")
    differences = [abs(one - other) for one, other in zip(found, plain, strict=True)]
    assert BF16_AND_8_BITS[0] < min(differences) and max(differences) < BF16_AND_8_BITS[1], differences
    assert found[-1] < found[0] - 0.1
    assert len(gradients) == 25 and all(0 < norm < 10 for norm in gradients.values()), gradients


@needs_torchao
def test_the_export_and_a_resumed_run_are_as_in_bf16(folder: Path, device: torch.device, tmp_path: Path) -> None:
    plain, engine = (FsdpEngine(ModelFacts(folder), settings(precision), device) for precision in ("bf16", "fp8"))
    trained(engine, 2)
    engine.save(tmp_path / "checkpoint").result()
    trained(engine, 2)
    resumed = FsdpEngine(ModelFacts(folder), settings("fp8"), device)
    resumed.load(tmp_path / "checkpoint")
    trained(resumed, 2)
    for name, one in (("plain", plain), ("whole", engine), ("resumed", resumed)):
        one.export(tmp_path / name, torch.bfloat16)
    shapes, whole, after = (load_file(tmp_path / name / "model.safetensors") for name in ("plain", "whole", "resumed"))
    assert {name: (one.dtype, one.shape) for name, one in whole.items()} == {
        name: (one.dtype, one.shape) for name, one in shapes.items()
    }
    assert all(torch.equal(whole[name], after[name]) for name in whole)
    assert not any(torch.equal(whole[name], shapes[name]) for name in whole if "layernorm" not in name)
    assert (tmp_path / "whole" / "config.json").read_text() == (tmp_path / "plain" / "config.json").read_text()


@needs_torchao
@pytest.mark.parametrize("layout", [{"recompute": "selective"}, {"recompute": "full"}], ids=str)
def test_recomputation_changes_nothing(folder: Path, device: torch.device, layout: dict[str, str]) -> None:
    kept = trained(FsdpEngine(ModelFacts(folder), settings("fp8"), device), 2)
    assert trained(FsdpEngine(ModelFacts(folder), settings("fp8", layout=layout), device), 2) == kept


@needs_torchao
def test_an_adapter_learns_beside_products_in_8_bits(folder: Path, device: torch.device) -> None:
    adapter = AdapterConfig(rank=16, alpha=16)
    plain, eight = (
        trained(FsdpEngine(ModelFacts(folder), settings(precision, adapter=adapter), device))
        for precision in ("bf16", "fp8")
    )
    differences = [abs(one - other) for one, other in zip(eight, plain, strict=True)]
    assert BF16_AND_8_BITS[0] < max(differences) < BF16_AND_8_BITS[1], differences
    assert eight[-1] < eight[0]


@needs_torchao
def test_what_cannot_or_should_not_multiply_in_8_bits_is_left_and_counted() -> None:
    config = Qwen3Config(**{**SIZES, "intermediate_size": 100}, head_dim=16, tie_word_embeddings=True)
    model = Qwen3ForCausalLM(config)
    add_adapter(model, AdapterConfig(rank=16, target_modules=("q_proj",)), seed=0)
    found = multiply_in_eight_bits(model, float8_config("rowwise"))
    assert found == (
        "8 linear layers multiply in 8 bits, with scales of rows; left in bf16: 4 of adapters, 6 with a size that is "
        "no multiple of 16, 1 head"
    )
    kinds = {name: type(one).__name__ for name, one in model.named_modules() if isinstance(one, nn.Linear)}
    converted = {name for name, kind in kinds.items() if kind == "Float8Linear"}
    attention = [f"model.layers.{layer}.self_attn.{name}_proj" for layer in range(2) for name in "kvo"]
    assert converted == {*attention, *(f"model.layers.{layer}.self_attn.q_proj.base_layer" for layer in range(2))}


def test_routers_stay_in_bf16() -> None:
    with torch.device("meta"):
        model = MixtralForCausalLM(MixtralConfig(**SIZES, num_local_experts=16))
    reasons = float8_exclusions(model)
    assert {name.rpartition(".")[2]: reason for name, reason in reasons.items()} == {
        **dict.fromkeys(("q_proj", "k_proj", "v_proj", "o_proj"), None), "lm_head": "head",
    }  # fmt: skip


@needs_torchao
def test_a_model_without_such_layers_is_refused() -> None:
    with torch.device("meta"):
        model = Qwen3ForCausalLM(Qwen3Config(**{**SIZES, "hidden_size": 60}, head_dim=16))
    with pytest.raises(ModelError, match=r"Qwen3ForCausalLM has none .*14 with a size .*, 1 head\); say"):
        multiply_in_eight_bits(model, float8_config("tensorwise"))


def test_where_torchao_is_missing_it_is_said_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fsdp.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ResourceError, match=r"torchao, which is not installed here; .*`pip install .*fp8.in`"):
        float8_config("tensorwise")
