"""Every attention kernel that runs on a CPU computes the same, and each device takes the first that can."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention import flex_attention as torch_flex
from torch.nn.attention.flex_attention import create_block_mask
from transformers.models.gemma3.modeling_gemma3 import create_masks_for_vision_model, get_block_sequence_ids_for_mask

from stages.core.errors import ModelError
from stages.engines import attention_kernels
from stages.engines.attention import PACKED_DOCUMENTS
from stages.engines.attention_kernels import KERNELS, AttentionOptions, Feature, Request, attend, choose
from stages.engines.documents import PackedDocuments
from stages.models.layers import decoder_of
from stages.parallel.device_types import device_type
from tests.unit.stages.engines.test_attention import build, gradients_of
from tests.zoo.models import tiny_config

CPU = torch.device("cpu")
LENGTHS = [150, 1, 40, 200, 9]
NUM_TOKENS, HEADS, GROUPS, WIDTH = sum(LENGTHS), 4, 2, 16
BLOCKS = torch.full((NUM_TOKENS,), -1)
for block, (begin, end) in enumerate([(10, 60), (60, 90), (145, 155), (200, 330)]):
    BLOCKS[begin:end] = block  # the third crosses from the first document through the second into the third
OPTIONS = {
    "plain": AttentionOptions(),
    "scaled": AttentionOptions(scaling=0.5),
    "window": AttentionOptions(window_tokens=30),
    "soft cap": AttentionOptions(softcap=2.0),
    "sinks": AttentionOptions(sinks=torch.linspace(-1, 1, HEADS)),
    "all": AttentionOptions(0.3, 0.0, 20, 2.0, torch.linspace(-1, 1, HEADS)),
}


def states() -> list[Tensor]:
    torch.manual_seed(0)
    return [torch.randn(NUM_TOKENS, heads, WIDTH, requires_grad=True) for heads in (HEADS, GROUPS, GROUPS)]


def results(kernel: str, documents: PackedDocuments, options: AttentionOptions) -> list[Tensor]:
    """Return a kernel's output, and the gradients of queries, keys, values and sinks."""
    inputs = states()
    if options.sinks is not None:
        options = replace(options, sinks=options.sinks.clone().requires_grad_())
        inputs.append(options.sinks)
    output = KERNELS[kernel].compute(*inputs[:3], documents, options)
    weights = torch.randn(output.shape, generator=torch.Generator().manual_seed(1))
    return [output, *torch.autograd.grad((output * weights).sum(), inputs)]


def check_equal(found: list[Tensor], expected: list[Tensor]) -> None:
    """Check that two kernels' outputs and gradients are equal, but for rounding."""
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-5)


@pytest.fixture
def uncompiled_flex(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let FlexAttention run backward on a CPU, where torch has it for uncompiled attention, and compiled only forward.

    Uncompiled, it computes all pairs of positions, and applies the mask to each.
    """
    monkeypatch.setattr(torch_flex, "_validate_device", lambda *_: None)
    monkeypatch.setattr(attention_kernels, "_compiled_flex", lambda: torch_flex.flex_attention)


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("blocks", [None, BLOCKS], ids=["", "blocks"])
@pytest.mark.parametrize("kind", OPTIONS)
def test_flex_attention_equals_padded_documents(kind: str, blocks: Tensor | None, uncompiled_flex: None) -> None:
    documents = PackedDocuments(LENGTHS, CPU, blocks=blocks)
    check_equal(results("flex", documents, OPTIONS[kind]), results("padded", documents, OPTIONS[kind]))


@pytest.mark.parametrize("kind", OPTIONS)
def test_blocks_and_windows_equal_one_mask_of_all_pairs(kind: str) -> None:
    documents = PackedDocuments(LENGTHS, CPU, blocks=BLOCKS)
    everyone = PackedDocuments(LENGTHS, CPU, blocks=BLOCKS, queries=torch.arange(NUM_TOKENS))
    check_equal(results("padded", documents, OPTIONS[kind]), results("padded", everyone, OPTIONS[kind]))


@pytest.mark.parametrize("window", [None, 1, 33, 500])
@pytest.mark.parametrize("queries", [None, torch.arange(7, NUM_TOKENS, 3).flip(0)], ids=["", "some queries"])
@pytest.mark.parametrize("blocks", [None, BLOCKS], ids=["", "blocks"])
def test_block_masks_equal_those_that_torch_makes_of_all_pairs(
    blocks: Tensor | None, queries: Tensor | None, window: int | None
) -> None:
    visible = PackedDocuments(LENGTHS, CPU, blocks=blocks, queries=queries).visible(window)
    block_mask = visible.block_mask
    num_queries = len(visible.first)
    expected = create_block_mask(block_mask.mask_mod, None, None, num_queries, NUM_TOKENS, device="cpu")
    own = torch.arange(num_queries)[:, None], torch.arange(NUM_TOKENS)[None]
    assert torch.equal(block_mask.mask_mod(0, 0, *own), visible.mask)
    # Ours may list a block of which a query sees nothing, where queries do not follow each other.
    seen, needed = block_mask.to_dense().bool(), expected.to_dense().bool()
    assert not (needed & ~seen).any()
    assert queries is not None or torch.equal(seen, needed)
    assert torch.equal(whole_blocks(block_mask), whole_blocks(expected))


def whole_blocks(block_mask: Any) -> Tensor:
    """Return which blocks every query sees whole, bool [rows, columns], without the last column, which may be short."""
    numbers, indices = block_mask.full_kv_num_blocks[0, 0], block_mask.full_kv_indices[0, 0]
    dense = torch.zeros(indices.shape, dtype=torch.bool)
    for row, number in enumerate(numbers.tolist()):
        dense[row, indices[row, :number].long()] = True
    # Torch counts a block at the ragged end, or of a last row, as a partial one.
    return dense[:-1, :-1]


def test_a_query_elsewhere_sees_what_it_would_see_here() -> None:
    """Queries of one context-parallel rank get the rows of the attention of all."""
    queries = torch.arange(NUM_TOKENS).view(4, -1)[[3, 0]].flatten()
    query, key, value = states()
    for options in OPTIONS.values():
        everyone = attend(query, key, value, PackedDocuments(LENGTHS, CPU), options)
        some = attend(query[queries], key, value, PackedDocuments(LENGTHS, CPU, queries=queries), options)
        torch.testing.assert_close(some, everyone[queries], atol=1e-6, rtol=1e-5)


def test_images_in_gemma_3_equal_transformers() -> None:
    config = tiny_config("gemma3_text")
    assert set(config.layer_types) == {"sliding_attention", "full_attention"} and config.sliding_window <= 8
    lengths, is_image = [30, 12], torch.zeros(42, dtype=torch.int64)
    for begin, end in ((3, 9), (10, 24), (33, 40)):
        is_image[begin:end] = 1
    tokens = torch.randint(1, 64, (42,), generator=torch.Generator().manual_seed(0))
    model, reference = build(config, PACKED_DOCUMENTS), build(config, "eager")
    blocks = get_block_sequence_ids_for_mask(is_image[None])[0]
    documents = PackedDocuments(lengths, CPU, blocks=blocks)
    positions = torch.cat([torch.arange(length) for length in lengths])[None]
    packed = decoder_of(model)(input_ids=tokens[None], position_ids=positions, documents=documents, use_cache=False)[0]
    alone = []
    for begin, length in ((0, 30), (30, 12)):
        own, numbers = tokens[begin : begin + length][None], blocks[begin : begin + length][None]
        masks = create_masks_for_vision_model(
            reference.config, decoder_of(reference).embed_tokens(own), None, None, None, numbers
        )
        alone.append(decoder_of(reference)(input_ids=own, attention_mask=masks, use_cache=False)[0])
    torch.testing.assert_close(packed, torch.cat(alone, 1), atol=1e-5, rtol=1e-5)
    found, expected = gradients_of(model, packed), gradients_of(reference, torch.cat(alone, 1))
    for name, gradient in expected.items():
        scale = max(gradient.abs().max().item(), 1.0)
        torch.testing.assert_close(found[name], gradient, atol=1e-5 * scale, rtol=1e-5, msg=name)


@pytest.fixture
def fused_on_cpu() -> Iterator[list[str]]:
    """Give torch's memory-efficient operation a CPU kernel, by products; it lists what it was called with."""
    calls: list[str] = []

    def weights(query: Tensor, key: Tensor, scale: float) -> Tensor:
        mask = torch.ones(query.shape[2], key.shape[2], dtype=torch.bool).tril()
        return (scale * query @ key.mT).masked_fill(~mask, -torch.inf).softmax(3)

    def forward(query, key, value, bias, keeps_sums, dropout=0.0, is_causal=False, *, scale=None):  # type: ignore
        assert query.shape[1] == key.shape[1] and is_causal and keeps_sums and bias is None
        calls.append(f"{len(query)} × {query.shape[2]}")
        output = weights(query, key, scale or WIDTH**-0.5) @ value
        return output, query.new_empty(0), torch.empty(()), torch.empty(())

    def backward(gradient, query, key, value, *_, scale=None, **__):  # type: ignore
        shares, scale = weights(query, key, scale or WIDTH**-0.5), scale or WIDTH**-0.5
        of_shares = gradient @ value.mT
        # Gradient of the softmax's input.
        of_scores = scale * shares * (of_shares - (of_shares * shares).sum(3, keepdim=True))
        return of_scores @ key, of_scores.mT @ query, shares.mT @ gradient, None

    with torch.library._scoped_library("aten", "IMPL") as library:
        library.impl("_scaled_dot_product_efficient_attention", forward, "CPU")
        library.impl("_scaled_dot_product_efficient_attention_backward", backward, "CPU")
        yield calls


@pytest.mark.parametrize("kind", ["plain", "scaled"])
def test_the_memory_efficient_kernel_gets_a_key_for_each_query(kind: str, fused_on_cpu: list[str]) -> None:
    documents = PackedDocuments(LENGTHS, CPU)
    pairs = zip(
        results("efficient", documents, OPTIONS[kind]), results("padded", documents, OPTIONS[kind]), strict=True
    )
    for found, expected in pairs:
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
    assert fused_on_cpu == ["1 × 200", "1 × 150", "1 × 40", "1 × 9", "1 × 1"]


@pytest.mark.parametrize("blocks", [None, BLOCKS], ids=["", "blocks"])
@pytest.mark.parametrize("lengths", [LENGTHS, [NUM_TOKENS], [NUM_TOKENS // 4] * 4])
def test_the_operation_of_compiled_layers_is_as_it_says(lengths: list[int], blocks: Tensor | None) -> None:
    """Shapes, strides and gradients: torch checks its description against what it does."""
    options = OPTIONS["sinks"]
    assert options.sinks is not None
    boundaries, sinks = PackedDocuments(lengths, CPU).boundaries, options.sinks.clone().requires_grad_()
    for heads_first in (False, True):
        inputs = [one.detach() for one in states()]
        if heads_first:  # in memory, as a view of [heads, tokens, width]
            inputs = [one.transpose(0, 1).contiguous().transpose(0, 1) for one in inputs]
        arguments = (*(one.requires_grad_() for one in inputs), boundaries, blocks, sinks, 0.3, 0.0, 20, None)
        torch.library.opcheck(torch.ops.lifecycle.padded_attention.default, arguments)


def test_dropout_of_the_operation_is_the_same_in_the_backward_pass() -> None:
    """The gradient of a sum of outputs with regard to one token's values is that token's attention weights."""
    query, key, value = states()
    boundaries = PackedDocuments(LENGTHS, CPU).boundaries
    torch.manual_seed(5)
    output, seed = torch.ops.lifecycle.padded_attention(
        query, key, value, boundaries, None, None, None, 0.5, None, None
    )
    (found,) = torch.autograd.grad(output.sum(), value)
    documents, options = PackedDocuments(LENGTHS, CPU), AttentionOptions(dropout=0.5)
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(int(seed))
        again = KERNELS["padded"].compute(query, key, value, documents, options)
    assert torch.equal(output, again)
    assert torch.equal(found, torch.autograd.grad(again.sum(), value)[0])


ANY_LENGTH: Feature = "documents of any length"
EVEN = Request("cuda", (9, 0), torch.bfloat16, 128, 128, frozenset())
HOPPER = replace(EVEN, features=frozenset({ANY_LENGTH}))
ALL: frozenset[Feature] = frozenset({"sliding window", "soft cap", "sinks", "blocks", ANY_LENGTH})


@pytest.mark.parametrize(
    ("request_", "kernel"),
    [
        (HOPPER, "flash"),
        (replace(HOPPER, features=frozenset({"sliding window"})), "flash"),
        (replace(HOPPER, capability=None), "flash"),  # tensors without data
        (replace(HOPPER, dtype=torch.float32), "efficient"),
        (replace(HOPPER, head_width=512, value_width=512), "efficient"),
        (replace(HOPPER, head_width=192), "efficient"),
        (replace(HOPPER, features=frozenset({"dropout"})), "efficient"),
        (replace(HOPPER, head_width=100, value_width=100), "flex"),
        (replace(HOPPER, features=ALL), "flex"),
        (replace(HOPPER, dtype=torch.float32, features=frozenset({"sliding window"})), "flex"),
        (replace(HOPPER, dtype=torch.float32, capability=(7, 5)), "efficient"),
    ],
)
def test_a_gpu_takes_the_first_kernel_that_can(request_: Request, kernel: str) -> None:
    for name in ("cuda", "rocm"):
        assert choose(replace(request_, device=name), device_type(name).attention) == kernel


def test_a_cpu_takes_padded_documents_for_everything() -> None:
    asked = Request("cpu", None, torch.float32, 100, 60, ALL | {"dropout", "context parallelism"})
    assert choose(asked, device_type("cpu").attention, "cudnn") == "padded"


@pytest.mark.parametrize(
    ("request_", "reason"),
    [
        (replace(HOPPER, capability=(7, 5)), "bfloat16 from compute capability 8.0 on, and this device has 7.5.*fp32"),
        (replace(HOPPER, features=frozenset({"dropout", "soft cap"})), "flex has no dropout.*attention_dropout"),
        (replace(HOPPER, dtype=torch.float64), "flash does not take float64"),
    ],
)
def test_what_only_the_math_kernel_could_compute_is_refused_on_a_gpu(request_: Request, reason: str) -> None:
    with pytest.raises(ModelError, match=reason):
        choose(request_, device_type("cuda").attention)


def test_in_a_compiled_layer_no_shape_depends_on_lengths() -> None:
    names = device_type("cuda").attention
    assert choose(replace(EVEN, in_graph=True), names, "cudnn") == "flash"
    assert choose(replace(HOPPER, in_graph=True, dtype=torch.float32), names) == "flex"
    with pytest.raises(ModelError, match=r"efficient cannot be part of a compiled layer.*flex has no dropout"):
        choose(replace(HOPPER, in_graph=True, features=frozenset({"dropout"})), names)


def test_cudnn_computes_documents_of_one_length_on_hopper() -> None:
    names = device_type("cuda").attention
    assert choose(EVEN, names) == "cudnn"
    lacking: tuple[Feature, ...] = (ANY_LENGTH, "sliding window", "the same bits each time")
    for other in (
        *(replace(EVEN, features=frozenset({one})) for one in lacking),
        replace(EVEN, capability=(8, 0)),
        replace(EVEN, head_width=192, value_width=192),
        replace(EVEN, in_graph=True),
    ):
        assert choose(other, names) == "flash"
    assert choose(EVEN, device_type("rocm").attention) == "flash"
    assert choose(EVEN, names, "flash") == "flash"
