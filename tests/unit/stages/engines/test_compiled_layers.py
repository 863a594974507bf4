"""A compiled layer is one graph with attention inside, for all documents, and recomputes nothing that is kept."""

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import Any

import pytest
import torch
from functorch.compile import make_boxed_func
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.utils import counters
from torch.nn import functional
from torch.nn.attention import flex_attention
from transformers import PreTrainedConfig
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5GatedDeltaNet

from stages.engines.attention import PACKED_DOCUMENTS, hidden_states
from stages.engines.attention_kernels import KERNELS
from stages.engines.fsdp.parallelize import apply_recompute, compile_layers
from stages.engines.mixers import mix_by_document
from stages.models.layers import decoder_of, text_layers, transformer_layers
from stages.parallel import accelerator
from stages.parallel.layout import Layout
from tests.fake_gpu.devices import GPU
from tests.unit.stages.engines.test_attention import build, gradients_of, packed_batch
from tests.zoo.models import tiny_config

PRODUCTS = (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
PRODUCTS_OF_A_LAYER = 7
ATTENTION = ("lifecycle.padded_attention.default", "flex_attention", "torch_attn._varlen_attn.default")
LAYERS = 2


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Counter[str]]]:
    """Compile graphs without Inductor; they count their runs, products and calls of attention, by direction."""
    counted: dict[str, Counter[str]] = {"forward": Counter(), "backward": Counter()}

    def compiler(direction: str) -> Callable[..., Any]:
        def compile_graph(graph: torch.fx.GraphModule, inputs: Any) -> Any:
            targets = [node.target for node in graph.graph.nodes if node.op == "call_function"]
            run = graph.forward

            def counting(*arguments: Any) -> Any:
                counted[direction]["graphs"] += 1
                counted[direction]["products"] += sum(target in PRODUCTS for target in targets)
                counted[direction]["attention"] += sum(str(target) in ATTENTION for target in targets)
                return run(*arguments)

            return make_boxed_func(counting)

        return compile_graph

    backend = aot_autograd(fw_compiler=compiler("forward"), bw_compiler=compiler("backward"))
    torch._dynamo.reset()
    counters.clear()
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=backend))
    yield counted
    torch._dynamo.reset()


def both(config: PreTrainedConfig, recompute: str) -> tuple[nn.Module, nn.Module]:
    """Return a model with compiled layers and one without."""
    models = build(config, PACKED_DOCUMENTS).train(), build(config, PACKED_DOCUMENTS).train()
    for model in models:
        mix_by_document(text_layers(model), {Qwen3_5GatedDeltaNet})
    layout = Layout(recompute=recompute)  # type: ignore[arg-type]
    compile_layers(transformer_layers(models[0]), layout)
    apply_recompute(models[1], layout)
    return models


def learned(
    model: nn.Module, lengths: list[int], *, is_compiled: bool, rows: int = 2
) -> tuple[Tensor, dict[str, Tensor]]:
    model.zero_grad()
    hidden = hidden_states(decoder_of(model), packed_batch(lengths, rows).inputs, is_compiled=is_compiled)
    return hidden.detach(), gradients_of(model, hidden)


def check_equal(found: tuple[Tensor, dict[str, Tensor]], expected: tuple[Tensor, dict[str, Tensor]]) -> None:
    torch.testing.assert_close(found[0], expected[0], atol=1e-5, rtol=1e-5)
    assert found[1].keys() == expected[1].keys()
    for name, gradient in expected[1].items():
        scale = max(gradient.abs().max().item(), 1.0)
        torch.testing.assert_close(found[1][name], gradient, atol=1e-5 * scale, rtol=1e-5, msg=name)


@pytest.mark.parametrize(
    ("recompute", "products", "attention"), [("none", 14, 0), ("selective", 14, 0), ("full", 20, 1)]
)
def test_a_layer_is_one_graph_and_recomputes_what_the_layout_says(
    recompute: str, products: int, attention: int, compiled: dict[str, Counter[str]]
) -> None:
    model, eager = both(tiny_config("qwen3"), recompute)
    found, expected = (learned(one, [7, 9, 12, 4], is_compiled=one is model) for one in (model, eager))
    check_equal(found, expected)
    assert not counters["graph_break"]
    assert counters["stats"]["unique_graphs"] == 1  # all layers share it
    # Two products with each of seven weights; recomputed are all but the last, whose result is not needed.
    assert compiled["forward"] == {"graphs": LAYERS, "products": LAYERS * PRODUCTS_OF_A_LAYER, "attention": LAYERS}
    assert compiled["backward"] == Counter(graphs=LAYERS, products=LAYERS * products, attention=LAYERS * attention)


@pytest.fixture(params=["cpu", "gpu"])
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Let a CPU take a GPU's kernels, too: FlexAttention, which torch can run backward there if it is not compiled."""
    if request.param == "gpu":
        monkeypatch.setattr(accelerator, "DEVICE_TYPES", (GPU,))
        monkeypatch.setattr(flex_attention, "_validate_device", lambda *_: None)
    accelerator.of_device.cache_clear()
    yield request.param
    accelerator.of_device.cache_clear()


@pytest.mark.parametrize("family", ["gpt_oss", "gemma2", "mistral"])
def test_windows_caps_and_sinks_are_in_the_graph(
    family: str, device: str, compiled: dict[str, Counter[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, eager = both(tiny_config(family), "none")
    if family == "gpt_oss":  # on a CPU, Transformers' grouped products read the experts' loads
        model.set_experts_implementation("batched_mm")
    found = learned(model, [7, 9, 12, 4], is_compiled=True)
    monkeypatch.undo()
    accelerator.of_device.cache_clear()
    check_equal(found, learned(eager, [7, 9, 12, 4], is_compiled=False))
    assert not counters["graph_break"]
    assert compiled["forward"]["graphs"] == LAYERS
    assert compiled["forward"]["attention"] == LAYERS


def test_flash_attention_is_in_the_graph_and_kept(
    compiled: dict[str, Counter[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Flash attention computes on a CPU by documents, for this test alone, in fp32."""
    monkeypatch.setitem(KERNELS, "flash", replace(KERNELS["flash"], dtypes={}))
    monkeypatch.setattr(accelerator, "DEVICE_TYPES", (GPU,))
    accelerator.of_device.cache_clear()
    model, eager = both(tiny_config("qwen3"), "selective")
    with torch.library._scoped_library("torch_attn", "IMPL") as library:
        library.impl("_varlen_attn", _varlen_attention, "CPU")
        library.impl("_varlen_attn_backward", _varlen_backward, "CPU")
        results = [learned(model, lengths, is_compiled=True) for lengths in ([7, 9, 12, 4], [16, 16], [7, 9, 16])]
    monkeypatch.undo()
    accelerator.of_device.cache_clear()
    check_equal(results[0], learned(eager, [7, 9, 12, 4], is_compiled=False))
    assert not counters["graph_break"]
    assert counters["stats"]["unique_graphs"] == 1
    assert compiled["forward"]["attention"] == 3 * LAYERS
    assert compiled["backward"] == Counter(graphs=3 * LAYERS, products=3 * LAYERS * 14)


def _varlen_attention(query, key, value, boundaries, _, longest, *rest):  # type: ignore[no-untyped-def]
    assert longest == 16  # the length of a row, whatever the documents' are
    output = attend_by_document(query, key, value, boundaries)
    return output, query.new_empty(query.shape[1], len(query)), torch.empty(2, dtype=torch.uint64)


def _varlen_backward(gradient, query, key, value, output, sums, boundaries, *rest):  # type: ignore[no-untyped-def]
    with torch._C._SetExcludeDispatchKeyGuard(torch._C.DispatchKey.AutogradFunctionality, False), torch.enable_grad():
        inputs = [one.detach().requires_grad_() for one in (query, key, value)]
        return torch.autograd.grad(attend_by_document(*inputs, boundaries), inputs, gradient)


def attend_by_document(query: Tensor, key: Tensor, value: Tensor, boundaries: Tensor) -> Tensor:
    """Return causal attention, [tokens, heads, width], one document after the other."""
    documents = [
        functional.scaled_dot_product_attention(
            *(states[begin:end].transpose(0, 1) for states in (query, key, value)), is_causal=True, enable_gqa=True
        ).transpose(0, 1)
        for begin, end in pairwise(boundaries.tolist())
    ]
    return torch.cat(documents)


@pytest.mark.parametrize(
    ("family", "recompute"),
    [("qwen3_moe", "none"), ("qwen3_moe", "selective"), ("qwen3_moe", "full"), ("qwen3_5_text", "full")],
)
def test_a_layer_that_cannot_be_one_graph_computes_the_same(family: str, recompute: str, compiled: Any) -> None:
    model, eager = both(tiny_config(family), recompute)
    check_equal(*(learned(one, [7, 9, 12, 4], is_compiled=one is model) for one in (model, eager)))


def test_other_documents_do_not_compile_a_layer_again(compiled: dict[str, Counter[str]]) -> None:
    model, _ = both(tiny_config("qwen3"), "selective")
    for cut in range(1, 21):
        learned(model, [cut, 32 - cut, 20, 12] if cut % 2 else [32, 32 - cut, cut], is_compiled=True)
    assert counters["stats"]["unique_graphs"] == 1
    assert compiled["forward"]["graphs"] == 20 * LAYERS


def test_documents_as_rows_of_their_own_compile_a_layer_once_for_many_rows_and_once_for_one(compiled: Any) -> None:
    model, eager = (build(tiny_config("bloom"), "eager").train() for _ in range(2))
    compile_layers(transformer_layers(model), Layout(), packs=False)
    for lengths in ([7, 9, 12, 4], [20, 12], [32], [3, 29]):
        check_equal(*(learned(one, lengths, is_compiled=one is model, rows=1) for one in (model, eager)))
    assert counters["stats"]["unique_graphs"] == 2
