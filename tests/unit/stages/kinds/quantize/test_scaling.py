"""Layers that AWQ can scale are found by computing with the model, whatever the names of its modules."""

import pytest
import torch
from torch import nn

from stages.kinds.quantize.scaling import Scaling, find_scalings
from tests.zoo.models import tiny_model

TOKENS = torch.arange(1, 17)[None]
ATTENTION = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
MLP = ("mlp.gate_proj", "mlp.up_proj")
DOWN = ("mlp.up_proj", ("mlp.down_proj",))
FOUND = {
    "llama": {("input_layernorm", ATTENTION), ("post_attention_layernorm", MLP), DOWN},
    "qwen3": {("input_layernorm", ATTENTION), ("post_attention_layernorm", MLP), DOWN},
    "olmo2": {("self_attn.v_proj", ("self_attn.o_proj",)), DOWN},
    "glm4": {
        ("input_layernorm", ATTENTION), ("post_attention_layernorm", ("mlp.gate_up_proj",)),
        ("mlp.gate_up_proj", ("mlp.down_proj",)),
    },
    "phi3": {
        ("input_layernorm", ("self_attn.qkv_proj",)), ("post_attention_layernorm", ("mlp.gate_up_proj",)),
        ("mlp.gate_up_proj", ("mlp.down_proj",)),
    },
    "cohere": {("input_layernorm", (*ATTENTION, *MLP)), DOWN},
    "nemotron": set(),
}  # fmt: skip
"""Expected AWQ scalings of a layer, by architecture; none before grouped-query attention's output projection."""


def linear(model):
    return {name for name, module in model.named_modules() if isinstance(module, nn.Linear)} - {"lm_head"}


@pytest.mark.parametrize("family", FOUND)
def test_what_is_scaled_follows_from_the_architecture(family):
    model = tiny_model(family)
    found = find_scalings(model, TOKENS, linear(model))
    for layer in range(2):
        prefix = f"model.layers.{layer}."
        inside = {(one.source.removeprefix(prefix), tuple(r.removeprefix(prefix) for r in one.readers))
                  for one in found if one.source.startswith(prefix)}  # fmt: skip
        assert inside == FOUND[family]
    assert len(found) == 2 * len(FOUND[family])
    assert all(one.of_norm == ("norm" in one.source) for one in found)


@pytest.mark.parametrize("family", ["llama", "olmo2", "glm4", "phi3", "cohere"])
def test_any_scale_leaves_the_predictions_as_they_were(family):
    model = tiny_model(family).double()
    before = model(TOKENS).logits
    generator = torch.Generator().manual_seed(0)
    found = find_scalings(model, TOKENS, linear(model))
    assert found
    with torch.no_grad():
        for one in found:
            readers = [model.get_submodule(name) for name in one.readers]
            scales = torch.rand(readers[0].in_features, generator=generator, dtype=torch.float64) + 0.5
            source = model.get_submodule(one.source)
            source.weight[-len(scales) :].div_(scales if source.weight.ndim == 1 else scales[:, None])
            for reader in readers:
                reader.weight.mul_(scales)
    assert torch.allclose(model(TOKENS).logits, before, rtol=0, atol=1e-5 * before.abs().max().item())


def test_the_model_is_left_as_it_was():
    model = tiny_model("phi3")
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    find_scalings(model, TOKENS, linear(model))
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert not any(module._forward_hooks for module in model.modules())


def test_what_is_not_to_be_quantized_is_not_scaled():
    model = tiny_model("llama")
    assert find_scalings(model, TOKENS, set()) == []
    (only,) = find_scalings(model, TOKENS, {"model.layers.1.mlp.down_proj"})
    assert only == Scaling(
        "model.layers.1.mlp.up_proj", ("model.layers.1.mlp.down_proj",), "model.layers.1.mlp", of_norm=False
    )


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.RMSNorm(8), nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, hidden):
        return self.down(self.up(self.norm(hidden)))


class KeepsAnOutput(nn.Module):
    """Model whose last layer reads an output of the first block directly, as models with shared keys and values do."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.blocks, self.end = nn.Embedding(32, 8), nn.ModuleList([Block(), Block()]), nn.Linear(16, 4)

    def forward(self, input_ids, attention_mask, use_cache):
        hidden, kept = self.embedding(input_ids), []
        handle = self.blocks[0].up.register_forward_hook(lambda _, __, output: kept.append(output))
        for block in self.blocks:
            hidden = hidden + block(hidden)
        handle.remove()
        return hidden.sum(-1, keepdim=True) + self.end(kept[0])


def test_what_another_layer_reads_as_well_is_not_scaled():
    torch.manual_seed(0)
    model = KeepsAnOutput()
    found = {one.source for one in find_scalings(model, TOKENS, linear(model))}
    assert found == {"blocks.0.norm", "blocks.1.norm", "blocks.1.up"}
