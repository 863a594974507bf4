"""Quantized layers that vLLM cannot serve are found by the sizes of real models, on GPU and CPU."""

import pytest

from stages.core.errors import RecipeError
from stages.kinds.quantize.config import QuantizeConfig
from stages.models.linear_layers import Projection
from stages.serving.engine import Quantization
from stages.serving.vllm.servability import AttentionHeads, caveats, check_servable

LLAMA_2_7B = {"hidden": 4096, "inner": 11008, "queries": 32, "keys": 32, "head": 128}
LLAMA_3_8B = {"hidden": 4096, "inner": 14336, "queries": 32, "keys": 8, "head": 128}
QWEN_2_5_HALF_B = {"hidden": 896, "inner": 4864, "queries": 14, "keys": 2, "head": 64}


def make_layers(hidden, inner, queries, keys, head, num_layers=2):
    layers = [Projection("lm_head", 32000, hidden)]
    for index in range(num_layers):
        attention, mlp = f"model.layers.{index}.self_attn", f"model.layers.{index}.mlp"
        layers += [
            Projection(f"{attention}.q_proj", queries * head, hidden),
            Projection(f"{attention}.k_proj", keys * head, hidden),
            Projection(f"{attention}.v_proj", keys * head, hidden),
            Projection(f"{attention}.o_proj", hidden, queries * head),
            Projection(f"{mlp}.gate_proj", inner, hidden),
            Projection(f"{mlp}.up_proj", inner, hidden),
            Projection(f"{mlp}.down_proj", hidden, inner),
        ]
    return layers


def make_quantization(**fields) -> Quantization:
    base = {"kind": "quantize", "model": "m", "method": "awq", "calibration": {"dataset": "d"}}
    return QuantizeConfig.model_validate({**base, **fields}).quantization


def check(shape, device="cuda", layers=None, **fields):
    heads = AttentionHeads(shape["queries"], shape["keys"])
    check_servable(layers or make_layers(**shape), heads, make_quantization(**fields), device)


def complaint(*args, **kwargs):
    with pytest.raises(RecipeError) as caught:
        check(*args, **kwargs)
    return str(caught.value)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("method", ["awq", "gptq", "int8", "fp8"])
@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
def test_llama_3_8b_is_served_at_every_usual_size(device, method, ranks):
    check(LLAMA_3_8B, device, method=method, tensor_parallel_size=ranks)


def test_a_group_across_ranks_is_found_and_the_group_size_that_fits_is_named():
    """Quantization groups that would cross tensor-parallel ranks are refused, with a group size that fits.

    Llama 2 7B on 4 ranks has inputs of 11008 / 4 = 2752 = 21.5 × 128 = 43 × 64.
    """
    message = complaint(LLAMA_2_7B, tensor_parallel_size=4)
    assert "model.layers.0.mlp.down_proj and 1 more: a rank's input of 2752 is no multiple of group_size 128" in message
    assert "set group_size: 64" in message
    assert "q_proj" not in message
    check(LLAMA_2_7B, tensor_parallel_size=4, group_size=64)


def test_eight_bits_do_not_mind_groups():
    check(LLAMA_2_7B, method="int8", tensor_parallel_size=4)
    check(LLAMA_2_7B, method="fp8", tensor_parallel_size=4)


def test_heads_that_ranks_cannot_share_are_named():
    message = complaint(QWEN_2_5_HALF_B, tensor_parallel_size=4)
    assert "14 query and 2 key heads cannot be divided between 4 ranks" in message
    assert "tensor_parallel_size" in message


def test_key_heads_are_repeated_when_there_are_more_ranks():
    check({**LLAMA_3_8B, "queries": 32, "keys": 2}, tensor_parallel_size=4)


def test_a_layer_that_no_group_size_fits_is_to_be_ignored_and_then_passes():
    shape = {**LLAMA_3_8B, "inner": 14344}
    message = complaint(shape, "cpu")
    assert "add 're:.*\\.(down_proj|gate_proj|up_proj)$' to ignore" in message
    check(shape, "cpu", ignore=("lm_head", r"re:.*\.(down_proj|gate_proj|up_proj)$"))


def test_an_odd_output_is_no_trouble_on_cuda_where_marlin_pads_it():
    shape = {**LLAMA_3_8B, "queries": 8, "keys": 1, "head": 24}
    layers = [layer for layer in make_layers(**shape) if layer.suffix == "q_proj"]
    check(shape, "cuda", layers=layers)
    check({**shape, "head": 24}, "cpu", layers=layers)
    narrow = [Projection("model.layers.0.self_attn.out", 24, 4096)]
    check(shape, "cuda", layers=narrow)
    assert "a rank's fused output of 24 is no multiple of 32" in complaint(shape, "cpu", layers=narrow)


@pytest.mark.parametrize(("device", "group_size", "served"), [
    ("cuda", 256, True), ("cuda", 512, False), ("cuda", 16, False), ("cpu", 16, True), ("cpu", 512, True),
])  # fmt: skip
def test_group_sizes_differ_by_device(device, group_size, served):
    if served:
        check(LLAMA_3_8B, device, group_size=group_size)
    else:
        assert f"group_size {group_size} is none of" in complaint(LLAMA_3_8B, device, group_size=group_size)


def test_experts_need_what_their_own_kernel_needs():
    experts = [
        Projection("model.layers.0.mlp.experts.0.gate_proj", 768, 2080),
        Projection("model.layers.0.mlp.experts.0.up_proj", 768, 2080),
        Projection("model.layers.0.mlp.experts.0.down_proj", 2080, 768),
    ]
    message = complaint(LLAMA_3_8B, "cuda", layers=experts, group_size=32, symmetric=True)
    assert "its hidden size of 2080 is no multiple of 128" in message


def test_experts_have_no_zero_points():
    experts = [Projection(f"model.layers.0.mlp.experts.{number}.down_proj", 2048, 768) for number in range(2)]
    message = complaint(LLAMA_3_8B, "cuda", layers=experts)
    assert "experts.0.down_proj and 1 more: Transformers reads no zero points of experts" in message
    assert "To fix it, set symmetric: true." in message
    check(LLAMA_3_8B, "cuda", layers=experts, symmetric=True)
    assert "set group_size: 64 and symmetric: true" in complaint(LLAMA_3_8B, layers=experts, tensor_parallel_size=4)


def test_layers_that_vllm_fuses_are_quantized_together():
    message = complaint(LLAMA_3_8B, method="fp8", ignore=("lm_head", r"re:.*\.k_proj$"))
    assert "vLLM fuses q_proj+k_proj+v_proj" in message
    assert "model.layers.0.self_attn.k_proj and 1 more" in message
    check(LLAMA_3_8B, method="fp8", ignore=("lm_head", r"re:.*\.[qkv]_proj$"))


def test_routers_and_the_head_are_never_quantized():
    layers = [
        *make_layers(**LLAMA_3_8B, num_layers=1),
        Projection("model.layers.0.mlp.gate", 8, 4096),
        Projection("model.layers.0.block_sparse_moe.gate", 8, 4096),
        Projection("model.layers.0.feed_forward.router", 8, 4096),
        Projection("model.layers.0.mlp.shared_expert_gate", 1, 4096),
    ]
    kept = {layer.suffix for layer in make_quantization().layers(layers)}
    assert kept == {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}


def test_heads_are_found_in_the_language_part_of_a_config():
    assert AttentionHeads.of({"text_config": {"num_attention_heads": 8, "num_key_value_heads": 2}}) == AttentionHeads(
        8, 2
    )
    assert AttentionHeads.of({"num_attention_heads": 8}) == AttentionHeads(8, 8)
    assert AttentionHeads.of({"hidden_size": 8}) is None


@pytest.mark.parametrize(("method", "flags", "warned"), [
    ("int8", {"avx2"}, "VNNI"), ("int8", {"avx512f", "avx512_vnni"}, None), ("int8", {"avx2", "avx_vnni"}, None),
    ("awq", {"avx2"}, "unpacks"), ("gptq", {"avx512f"}, None), ("fp8", {"avx2"}, None), ("int8", set(), None),
])  # fmt: skip
def test_what_a_cpu_does_to_the_served_model_is_told(method, flags, warned):
    found = caveats(make_quantization(method=method), "cpu", flags)
    assert [warned in caveat for caveat in found] == [True] * bool(warned)
    assert not caveats(make_quantization(method=method), "cuda", flags)


EXPERTS = [
    Projection(f"model.layers.0.block_sparse_moe.experts.{number}.{name}", 2048, 2048)
    for number in range(2)
    for name in ("w1", "w2", "w3")
]


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_int8_experts_are_not_read_back(device):
    message = complaint(LLAMA_3_8B, device, layers=EXPERTS, method="int8")
    assert "experts.0.w1 and 5 more: Transformers reads no int8 experts" in message
    advice = "choose method fp8" if device == "cuda" else r"choose method fp8 and add 're:.*\.experts\.' to ignore"
    assert f"To fix it, {advice}." in message


def test_a_cpu_has_no_kernel_for_fp8_experts_and_serves_them_unquantized():
    layers = [*EXPERTS, *make_layers(**LLAMA_3_8B, num_layers=1)]
    message = complaint(LLAMA_3_8B, "cpu", layers=layers, method="fp8")
    assert "fp8 would give a model that vLLM cannot serve on cpu" in message
    assert "vLLM has no kernel for fp8 experts on a CPU" in message
    assert r"To fix it, add 're:.*\.experts\.' to ignore." in message
    check(LLAMA_3_8B, "cpu", layers=layers, method="fp8", ignore=("lm_head", r"re:.*\.experts\."))
    check(LLAMA_3_8B, "cuda", layers=layers, method="fp8")


@pytest.mark.parametrize(("flags", "group_size", "reason"), [
    ((), 64, "on CPUs with AMX only, which this one lacks"),
    (("avx512f", "avx512_vnni"), 64, "on CPUs with AMX only, which this one lacks"),
    (("amx_tile",), 32, "experts with a group_size of 32 on no CPU"),
    (("amx_tile",), 64, None),
])  # fmt: skip
@pytest.mark.parametrize("method", ["awq", "gptq"])
def test_four_bit_experts_are_served_on_cpus_with_amx(method, flags, group_size, reason):
    quantization = make_quantization(method=method, symmetric=True, group_size=group_size)
    if not reason:
        check_servable(EXPERTS, None, quantization, "cpu", flags)
        return
    with pytest.raises(RecipeError, match=reason):
        check_servable(EXPERTS, None, quantization, "cpu", flags)
