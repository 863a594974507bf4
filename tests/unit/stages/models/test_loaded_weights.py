"""Weights that an architecture keeps in fp32 are exported and computed in fp32, as by Transformers; no others are."""

import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    DeepseekV3Config,
    Ernie4_5_MoeConfig,
    Glm4MoeConfig,
    HunYuanMoEV1Config,
    Lfm2MoeConfig,
    LlamaConfig,
    MiniMaxConfig,
    MiniMaxM2Config,
    OlmoHybridConfig,
    PreTrainedConfig,
    T5Config,
    T5ForConditionalGeneration,
)

from stages.core.errors import ModelError
from stages.data.batch import IGNORED, Batch, Documents
from stages.engines.export import export_model
from stages.engines.fsdp.engine import FsdpEngine
from stages.engines.fsdp.optimizer import convert_to_bf16
from stages.engines.settings import AdamSettings, EngineSettings
from stages.kinds.train.methods.sft import SftLoss
from stages.models.facts import ModelFacts
from stages.models.loaded_weights import dtype_of_weights, modules_kept_in_fp32
from stages.parallel.layout import Layout
from stages.parallel.processes import joined_processes

SIZES = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "moe_intermediate_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
}
SPECIAL = ("pad_token_id", "bos_token_id", "eos_token_id")
LATENT = {"q_lora_rank": 8, "kv_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 8, "v_head_dim": 6}
ROUTED = {"n_routed_experts": 8, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1}
CONFIGS: dict[str, Callable[[], PreTrainedConfig]] = {
    "deepseek_v3": lambda: DeepseekV3Config(**SIZES, **LATENT, **ROUTED),
    "glm4_moe": lambda: Glm4MoeConfig(**SIZES, **ROUTED, head_dim=8),
    "ernie4_5_moe": lambda: Ernie4_5_MoeConfig(**SIZES, moe_num_experts=8, moe_k=2, moe_layer_start_index=0),
    "lfm2_moe": lambda: Lfm2MoeConfig(
        **SIZES, num_experts=8, num_experts_per_tok=2, num_dense_layers=1, layer_types=["full_attention"] * 2
    ),
    "hunyuan_v1_moe": lambda: HunYuanMoEV1Config(**SIZES, head_dim=8, num_experts=8, moe_topk=2),
    "minimax_m2": lambda: MiniMaxM2Config(**SIZES, head_dim=8, num_local_experts=8, num_experts_per_tok=2),
    "olmo_hybrid": lambda: OlmoHybridConfig(
        **SIZES, layer_types=["linear_attention", "full_attention"], **dict.fromkeys(SPECIAL, None)
    ),
    "minimax": lambda: MiniMaxConfig(**SIZES, block_size=4, layer_types=["linear_attention", "full_attention"]),
}
KEPT = {
    "deepseek_v3": {"mlp.gate.e_score_correction_bias"},
    "glm4_moe": {"mlp.gate.e_score_correction_bias"},
    "ernie4_5_moe": {"mlp.gate.weight", "mlp.gate.moe_statics.e_score_correction_bias"},
    "lfm2_moe": {"feed_forward.expert_bias"},
    "hunyuan_v1_moe": {"mlp.gate.wg.weight"},
    # Buffers that files hold, in the dtype of the weights: biases of routers, and decays.
    "minimax_m2": set(),
    "minimax": set(),
    "olmo_hybrid": {"linear_attn.A_log"},
}


@pytest.fixture(params=CONFIGS)
def source(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """Provide the folder of a model whose router biases differ by less than bf16 can resolve."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(CONFIGS[request.param]())
    for name, value in model.state_dict().items():
        if name.endswith(("e_score_correction_bias", "expert_bias")):
            value.copy_(1 + 1e-3 * torch.randn(value.shape))
    model.save_pretrained(tmp_path / request.param)
    return tmp_path / request.param


def loaded(folder: Path, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    return dict(AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).state_dict())


def test_an_export_in_bf16_loads_like_the_original_in_bf16(source: Path, tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    folder = tmp_path / "exported"
    export_model(model, model.state_dict().items(), source=ModelFacts(source), folder=folder, dtype=torch.bfloat16)
    found, expected = loaded(folder, torch.bfloat16), loaded(source, torch.bfloat16)
    assert found.keys() == expected.keys()
    for name, weight in expected.items():
        assert found[name].dtype == weight.dtype, name
        assert torch.equal(found[name], weight), name
    assert kept_in_fp32(expected) >= KEPT[source.name]  # later versions keep whole routers (5.24)


def test_training_in_bf16_computes_them_in_fp32(source: Path) -> None:
    seen: dict[str, torch.dtype] = {}
    settings = EngineSettings(Layout(), "bf16", AdamSettings(1e-3))
    with joined_processes() as device:
        engine = FsdpEngine(ModelFacts(source), settings, device)
        for name, module in engine._model.causal_lm.named_modules():
            module.register_forward_pre_hook(lambda module, _, name=name: seen.update(dtypes(name, module)))
        outcome = engine.train_step([one_document(8)], SftLoss(), 1e-3, 1.0)
    assert outcome.grad_norm > 0
    expected = kept_in_fp32(loaded(source, torch.bfloat16))
    assert {in_layer(name) for name, dtype in seen.items() if dtype == torch.float32} == expected
    assert torch.bfloat16 in seen.values()


@pytest.mark.parametrize("source", ["minimax_m2"], indirect=True)
def test_buffers_that_are_computed_in_bf16_are_exported_in_fp32_as_they_were_stored(source: Path, tmp_path: Path):
    name = "model.layers.1.mlp.e_score_correction_bias"
    with joined_processes() as device:
        engine = FsdpEngine(ModelFacts(source), EngineSettings(Layout(), "bf16", AdamSettings(1e-3)), device)
        buffer = engine._model.causal_lm.get_buffer(name)
        assert buffer.dtype == torch.bfloat16
        engine.export(tmp_path / "untrained", torch.float32)
        buffer += 1
        engine.export(tmp_path / "trained", torch.float32)
        expected = buffer.cpu().float()
    assert torch.equal(loaded(tmp_path / "untrained", torch.float32)[name], loaded(source, torch.float32)[name])
    assert torch.equal(loaded(tmp_path / "trained", torch.float32)[name], expected)


def kept_in_fp32(weights: dict[str, torch.Tensor]) -> set[str]:
    return {in_layer(name) for name, weight in weights.items() if weight.dtype == torch.float32}


def in_layer(name: str) -> str:
    return re.sub(r".*layers\.\d+\.", "", name)


def dtypes(prefix: str, module: nn.Module) -> dict[str, torch.dtype]:
    """Return the dtype of each weight and buffer of a module during its forward pass, by name."""
    own = [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]
    return {f"{prefix}.{name}": value.dtype for name, value in own if "inv_freq" not in name}


def one_document(length: int) -> Batch:
    input_ids = torch.arange(length)[None]
    targets = torch.cat([input_ids[:, 1:], torch.tensor([[IGNORED]])], dim=1)
    return Batch.of(input_ids, targets, input_ids.clone(), Documents(torch.zeros_like(input_ids), 1, [length]))


def test_what_is_kept_depends_on_the_dtype_as_in_transformers() -> None:
    with torch.device("meta"):
        model = T5ForConditionalGeneration(T5Config(vocab_size=8, d_model=8, d_kv=4, d_ff=8, num_layers=1, num_heads=2))
    name = "encoder.block.0.layer.1.DenseReluDense.wo.weight"
    assert dtype_of_weights(model, torch.float16)(name) == torch.float32
    assert dtype_of_weights(model, torch.bfloat16)(name) == torch.bfloat16
    assert dtype_of_weights(model, torch.float32)(name) == torch.float32


def test_kept_weights_are_found_alone_and_amid_others() -> None:
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(LlamaConfig(**{**SIZES, "attention_bias": True}))
    model._keep_in_fp32_modules_strict = {"q_proj.bias", "o_proj"}
    modules, amid_others = modules_kept_in_fp32(model, torch.bfloat16)
    assert {*modules} == {layer.self_attn.o_proj for layer in model.model.layers}
    assert amid_others == {f"model.layers.{layer}.self_attn.q_proj.bias" for layer in range(2)}
    assert modules_kept_in_fp32(model, torch.float32) == ([], set())
    with pytest.raises(ModelError, match=r"keeps 2 in fp32 .*q_proj\.bias; remove it"):
        convert_to_bf16(model)
