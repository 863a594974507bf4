"""Base models quantized to 4 and 8 bits: rounding errors in forward and backward passes, and memory."""

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AutoModelForCausalLM, GPT2Config, Qwen3MoeConfig

from stages.adapters import quantized
from stages.adapters.config import AdapterConfig
from stages.adapters.lora import add_adapter, store_base
from stages.adapters.quantized import NF4_BLOCK, NF4_LEVELS, Int8Linear, Nf4Linear, quantize_base
from stages.core.errors import ModelError
from tests.unit.stages.adapters.test_lora import SIZES, make_model

ERRORS = {Int8Linear: 0.008, Nf4Linear: 0.1}
"""Largest allowed relative rounding error of normally distributed weights; NF4's own is 0.09 with blocks of 64."""


def make_layer(outlier=False):
    torch.manual_seed(0)
    layer = nn.Linear(256, 48).requires_grad_(False)
    nn.init.normal_(layer.weight)
    if outlier:
        layer.weight.data[:, 3] *= 50
    return layer


@pytest.mark.parametrize("made", ERRORS)
def test_weights_are_what_they_were_within_the_rounding(made):
    layer = make_layer()
    error = (made(layer).weight - layer.weight).norm() / layer.weight.norm()
    assert 1e-3 < error < ERRORS[made]


def test_a_weight_in_nf4_is_the_level_of_its_code_times_the_scale_of_its_block():
    """A weight in NF4 is its 4-bit code's level times its block's scale; a byte's lower half is the first of two."""
    layer = Nf4Linear(make_layer())
    codes = torch.stack([layer.codes & 15, layer.codes >> 4], -1).view(48, -1, NF4_BLOCK).int()
    scales = (layer.block_scales.float() / 255).square() * layer.row_scales.view(torch.float32)
    assert torch.equal(layer.weight, (torch.tensor(NF4_LEVELS)[codes] * scales[..., None]).flatten(1))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_a_gpu_decodes_in_one_kernel_has_the_same_bits(dtype):
    layer = Nf4Linear(make_layer(outlier=True))
    at_once = quantized._nf4_weights(layer.codes, layer._scales(), torch.tensor(NF4_LEVELS), dtype)
    assert torch.equal(at_once, layer.decoded(dtype))


def test_an_outlier_harms_the_64_weights_beside_it_alone():
    layer = make_layer(outlier=True)
    elsewhere = (Nf4Linear(layer).weight - layer.weight)[:, 64:]
    assert elsewhere.norm() / layer.weight[:, 64:].norm() < 0.11


@pytest.mark.parametrize("made", ERRORS)
def test_products_and_gradients_are_those_of_the_rounded_weight(made):
    layer = make_layer()
    quantized = made(layer)
    states = torch.randn(5, 256, requires_grad=True)
    quantized(states).square().sum().backward()
    found, states.grad = states.grad, None
    expected = nn.functional.linear(states, quantized.weight, layer.bias)
    assert torch.allclose(quantized(states), expected, rtol=1e-5, atol=1e-5)
    expected.square().sum().backward()
    assert torch.allclose(found, states.grad, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize(("made", "bits"), [(Int8Linear, 8.2), (Nf4Linear, 4.3)])
def test_it_takes_as_many_bytes(made, bits):
    quantized = made(make_layer())
    held = sum(one.nbytes for name, one in quantized.named_parameters() if name != "bias")
    assert 8 * held / (256 * 48) < bits


class MovedBytes(TorchDispatchMode):
    """Counter of the bytes that operations read and write, and of the largest tensor in fp32 that one makes."""

    def __init__(self):
        super().__init__()
        self.total = self.largest = 0

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        result = operation(*args, **(kwargs or {}))
        if not operation.is_view and "empty" not in str(operation):
            moved = {
                id(one): one.nbytes for one in tree_leaves([args, kwargs, result]) if isinstance(one, torch.Tensor)
            }
            self.total += sum(moved.values())
            if result.dtype == torch.float32:
                self.largest = max(self.largest, result.numel())
        return result


@pytest.mark.parametrize(("made", "most_bytes"), [(Int8Linear, 3.1), (Nf4Linear, 16)])
def test_a_weight_is_decoded_in_parts_and_rounded_once(made, most_bytes, monkeypatch):
    """A weight is decoded to bf16 some rows at a time, without an fp32 copy, and moves 16 bytes a weight at most."""
    layer = made(nn.Linear(1024, 1000).requires_grad_(False))
    expected = layer.weight.bfloat16()
    monkeypatch.setattr(quantized, "CHUNK_WEIGHTS", 64 * 1024 + 7)
    with MovedBytes() as moved:
        found = layer.decoded(torch.bfloat16)
    assert torch.equal(found, expected)
    assert moved.largest <= 64 * 1024
    assert moved.total < most_bytes * expected.numel()


@pytest.mark.parametrize("fields", [{}, {"init": "pissa"}])
def test_all_but_embedding_head_and_norms_is_quantized_and_the_adapter_learns(fields):
    model = make_model(hidden_size=64, head_dim=32, intermediate_size=128, tie_word_embeddings=False)
    exact = model(torch.arange(8)[None]).logits.detach()
    add_adapter(model, AdapterConfig(rank=4, **fields), seed=0)
    store_base(model, "nf4", torch.float32)
    assert sum(isinstance(one, Nf4Linear) for one in model.modules()) == 2 * 7
    logits = model(torch.arange(8)[None]).logits
    logits.square().mean().backward()
    assert (logits - exact).norm() / exact.norm() < 0.5
    assert all(one.grad is not None for one in model.parameters() if one.requires_grad)


@pytest.mark.parametrize(
    ("model", "precision", "message"),
    [
        (
            lambda: make_model(hidden_size=48),
            "nf4",
            r"inputs of model\.layers\.0\.self_attn\.q_proj, .* are no multiple of 64",
        ),
        (
            lambda: AutoModelForCausalLM.from_config(GPT2Config(**{"n_embd": 64, "n_layer": 1, "n_head": 2})),
            "int8",
            "GPT2LMHeadModel has none",
        ),
        (
            lambda: AutoModelForCausalLM.from_config(Qwen3MoeConfig(**SIZES, num_experts=2)),
            "int8",
            "experts.gate_up_proj",
        ),
    ],
)
def test_what_cannot_be_quantized_is_refused_by_name(model, precision, message):
    causal_lm = model().requires_grad_(False)
    with pytest.raises(ModelError, match=message):
        quantize_base(causal_lm, precision)
