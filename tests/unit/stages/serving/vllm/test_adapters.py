"""vLLM's arguments for LoRA adapters are computed from file headers; unsupported adapters are refused early."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import save_file
from safetensors.torch import load_file
from safetensors.torch import save_file as save_torch_file

from stages.adapters.headers import write_idle_adapter
from stages.core.errors import ModelError
from stages.serving.config import ServingConfig
from stages.serving.engine import LaunchSpec
from stages.serving.vllm.adapters import adapter_arguments, check_adapters, has_room

LAYER = "model.layers.0.self_attn.q_proj"


def adapter(folder: Path, *layers: str, rank: int = 8, others: tuple[str, ...] = (), **config: Any) -> Path:
    folder.mkdir(parents=True)
    factors = {
        f"{layer}.lora_{name}.weight": np.zeros(shape)
        for layer in layers or (LAYER,)
        for name, shape in (("A", (rank, 2)), ("B", (2, rank)))
    }
    tensors = {**factors, **{name: np.zeros(2) for name in others}}
    save_file(
        {f"base_model.model.{name}": value for name, value in tensors.items()}, folder / "adapter_model.safetensors"
    )
    (folder / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": rank, "lora_alpha": 8, **config}))
    return folder


@pytest.fixture
def spec(tmp_path: Path) -> Any:
    (tmp_path / "base").mkdir()
    (tmp_path / "base" / "config.json").write_text(json.dumps({"model_type": "qwen3"}))

    def make(**adapters: Path) -> LaunchSpec:
        return LaunchSpec(
            model=tmp_path / "base",
            served_name="base",
            adapters=adapters,
            serving=ServingConfig(),
            engine_version="0.32.0",
        )

    return make


def options(spec: LaunchSpec) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for argument in adapter_arguments(spec):
        if argument.startswith("--"):
            found[argument] = []
        else:
            found[next(reversed(found))].append(argument)
    return found


@pytest.mark.parametrize(("rank", "expected"), [(1, "1"), (2, "8"), (8, "8"), (12, "16"), (65, "128"), (512, "512")])
def test_ranks_that_vllm_lacks_get_the_next_that_it_has(spec: Any, tmp_path: Path, rank: int, expected: str) -> None:
    launch = spec(one=adapter(tmp_path / "one", rank=rank), small=adapter(tmp_path / "small", rank=1))
    check_adapters(launch)
    assert options(launch)["--max-lora-rank"] == [expected]


def test_all_layers_of_all_adapters_are_named_and_a_slot_stays_empty(spec: Any, tmp_path: Path) -> None:
    experts = "model.layers.3.mlp.experts.12.gate_proj"
    found = options(spec(a=adapter(tmp_path / "a"), b=adapter(tmp_path / "b", "model.layers.1.mlp.up_proj", experts)))
    assert found["--lora-target-modules"] == ["experts", "q_proj", "up_proj"]
    assert found["--max-loras"] == ["3"]
    modules = [json.loads(one) for one in found["--lora-modules"]]
    assert modules == [{"name": name, "path": str(tmp_path / name)} for name in "ab"]


@pytest.mark.parametrize(
    ("made", "expected"),
    [
        ({"rank": 513}, "its rank is 513, more than 512"),
        ({"use_dora": True}, "use_dora: True"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
        (
            {"target_parameters": [f"experts.{n}" for n in range(9)]},
            r"target_parameters: \[.*'experts.4', '…'\]; .*Merge",
        ),
        ({"bias": "all"}, "bias: all"),
        ({"peft_type": "IA3"}, "it is a IA3"),
        ({"init_lora_weights": "pissa_niter_4"}, "init_lora_weights: pissa_niter_4, which has changed the base"),
        ({"others": (f"{LAYER}.lora_magnitude_vector",)}, "its file holds"),
    ],
)
def test_what_vllm_could_not_serve_is_refused_by_name(spec: Any, tmp_path: Path, made: Any, expected: str) -> None:
    with pytest.raises(ModelError, match=rf"serving the adapter tuned .*{expected}.*`kind: merge`"):
        check_adapters(spec(tuned=adapter(tmp_path / "tuned", **made)))


@pytest.mark.parametrize("layer", ["lm_head", "model.embed_tokens"])
def test_adapters_of_embedding_and_head_are_refused(spec: Any, tmp_path: Path, layer: str) -> None:
    with pytest.raises(ModelError, match=f"it adapts {layer.rpartition('.')[2]}"):
        check_adapters(spec(tuned=adapter(tmp_path / "tuned", LAYER, layer)))


def test_a_quantized_base_is_refused(spec: Any, tmp_path: Path) -> None:
    (tmp_path / "base" / "config.json").write_text(
        json.dumps({"model_type": "qwen3", "quantization_config": {"quant_method": "compressed-tensors"}})
    )
    with pytest.raises(ModelError, match=r"serving tuned on .*base: it is quantized.*`kind: merge`"):
        check_adapters(spec(tuned=adapter(tmp_path / "tuned")))


@pytest.mark.parametrize(
    "config",
    [
        {"model_type": "qwen3_moe", "num_experts": 8},
        {"model_type": "mixtral", "num_local_experts": 8},
        {"model_type": "gemma4", "text_config": {"n_routed_experts": 8}},
    ],
)
def test_on_a_cpu_a_mixture_of_experts_takes_no_adapter(spec: Any, tmp_path: Path, config: Any) -> None:
    """An adapter on a mixture of experts is refused on CPUs, where vLLM 0.32 would die at the first request."""
    (tmp_path / "base" / "config.json").write_text(json.dumps(config))
    on_gpu = spec(tuned=adapter(tmp_path / "tuned"))
    with pytest.raises(ModelError, match=r"serving tuned on .*base: it is a mixture of experts.*`kind: merge`"):
        check_adapters(on_gpu.model_copy(update={"engine_version": "0.32.0+cpu"}))
    check_adapters(on_gpu)


def test_two_of_one_name_are_refused(spec: Any, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="two of the served models are called base"):
        check_adapters(spec(base=adapter(tmp_path / "tuned")))


def test_damaged_files_are_named(spec: Any, tmp_path: Path) -> None:
    folder = adapter(tmp_path / "tuned")
    weights = folder / "adapter_model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-5])
    with pytest.raises(ModelError, match=r"reading the adapter in .*tuned.*train it again"):
        check_adapters(spec(tuned=folder))


def test_a_running_server_has_room_for_what_it_leaves_nothing_of_out(spec: Any, tmp_path: Path) -> None:
    running = spec(one=adapter(tmp_path / "one", LAYER, "model.layers.1.mlp.up_proj", rank=12))
    assert has_room(running, adapter(tmp_path / "same", rank=16))
    assert not has_room(running, adapter(tmp_path / "higher", rank=17))
    assert not has_room(running, adapter(tmp_path / "elsewhere", LAYER, "model.layers.0.mlp.down_proj"))
    assert not has_room(running, adapter(tmp_path / "dora", use_dora=True))


def test_an_idle_adapter_is_the_same_but_for_its_effect(tmp_path: Path) -> None:
    torch.manual_seed(0)
    factors = {f"{LAYER}.lora_{name}.weight": torch.randn(8, 8).to(torch.bfloat16) for name in "AB"}
    source = adapter(tmp_path / "source")
    save_torch_file(factors, source / "adapter_model.safetensors")
    write_idle_adapter(source, tmp_path / "idle")
    idle = load_file(tmp_path / "idle" / "adapter_model.safetensors")
    assert torch.equal(idle[f"{LAYER}.lora_A.weight"], factors[f"{LAYER}.lora_A.weight"])
    assert not idle[f"{LAYER}.lora_B.weight"].any()
    assert torch.equal(
        load_file(source / "adapter_model.safetensors")[f"{LAYER}.lora_B.weight"], factors[f"{LAYER}.lora_B.weight"]
    )
