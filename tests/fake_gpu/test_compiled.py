"""Compiled attention computes what uncompiled attention does, and is compiled once for all documents."""

from __future__ import annotations

import pytest
import torch

from stages.engines.attention_kernels import KERNELS, AttentionOptions
from stages.engines.documents import PackedDocuments

CPU = torch.device("cpu")


@pytest.mark.nightly
def test_flex_attention_skips_blocks_and_is_compiled_once_for_all_documents() -> None:
    """Uses Inductor's kernel for CPUs, which has no backward pass, and no sums of scores for sinks."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    torch.manual_seed(0)
    inputs = [torch.randn(400, heads, 16) for heads in (4, 2, 2)]
    blocks = torch.full((400,), -1)
    blocks[145:260] = 0
    options = AttentionOptions(window_tokens=150, softcap=2.0)
    for lengths in ([150, 1, 40, 200, 9], [9, 200, 40, 1, 150], [100] * 4):
        documents = PackedDocuments(lengths, CPU, blocks=blocks)
        found, expected = (KERNELS[name].compute(*inputs, documents, options) for name in ("flex", "padded"))
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
