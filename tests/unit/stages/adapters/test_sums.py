"""Adding LoRA adapters gives an adapter whose weight change is the sum of theirs; its file states its rank."""

import pytest
import torch

from stages.adapters.adapter import Adapter, of_unchanged_base

RANK, ALPHA, SIZE = 3, 6.0, {"wide": (16, 10), "narrow": (4, 10), "other": (12, 10)}


def factors(rank, layer, seed):
    generator = torch.Generator().manual_seed(seed)
    rows, columns = SIZE[layer]
    return torch.randn(rank, columns, generator=generator), torch.randn(rows, rank, generator=generator)


def named(layers, seed):
    found = {}
    for layer in layers:
        a, b = factors(RANK, layer, seed)
        found |= {f"{layer}.lora_A.default.weight": a, f"{layer}.lora_B.default.weight": b}
    return found


def product(parameters, layer):
    return parameters[f"{layer}.lora_B.default.weight"] @ parameters[f"{layer}.lora_A.default.weight"]


@pytest.mark.parametrize("use_rslora", [False, True])
@pytest.mark.parametrize("takes_out", [False, True])
def test_the_change_is_what_was_learned_and_merged_less_what_was_taken_out(use_rslora, takes_out):
    learned, taken = named(["wide", "narrow"], 0), named(["wide", "narrow"], 1) if takes_out else {}
    merged = Adapter("base", {layer: factors(2, layer, 2) for layer in ("wide", "other")}, 0.7, False)
    config = {"r": RANK, "lora_alpha": ALPHA, "use_rslora": use_rslora, "target_modules": {"wide", "narrow"}}
    scaling = ALPHA / RANK**0.5 if use_rslora else ALPHA / RANK

    found, written = of_unchanged_base(learned, config, taken, merged)

    rank = written["r"]
    assert rank == RANK * (2 if takes_out else 1) + 2
    assert written["target_modules"] == ["narrow", "other", "wide"]
    written_scaling = written["lora_alpha"] / (rank**0.5 if use_rslora else rank)
    for layer, shape in SIZE.items():
        assert found[f"{layer}.lora_A.default.weight"].shape == (rank, shape[1])
        assert found[f"{layer}.lora_B.default.weight"].shape == (shape[0], rank)
        expected = scaling * product(learned, layer) if layer != "other" else torch.zeros(shape)
        expected = expected - (scaling * product(taken, layer) if taken and layer != "other" else 0)
        expected = expected + (merged.change(layer) if layer in merged.factors else 0)
        assert torch.allclose(written_scaling * product(found, layer), expected, atol=1e-5)
