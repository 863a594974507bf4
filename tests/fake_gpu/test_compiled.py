"""Inductor's code of attention and layers: compiled once for all documents, and of few kernels."""

import re

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch._inductor.utils import run_fw_bw_and_get_code
from transformers import Qwen3Config, Qwen3ForCausalLM

from stages.adapters.lora_linear import fuse_products
from stages.engines.attention import PACKED_DOCUMENTS, hidden_states, register_packed_attention
from stages.engines.attention_kernels import KERNELS, AttentionOptions
from stages.engines.documents import PackedDocuments
from stages.engines.fsdp.parallelize import compile_layers
from stages.models.layers import decoder_of, transformer_layers
from stages.parallel.layout import Layout
from stages.planner.kernels import COMPILED
from tests.unit.stages.engines.test_attention import packed_batch

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


@pytest.mark.nightly
@pytest.mark.parametrize(("num_adapters", "backward"), [(0, 25), (7, 42)])
def test_a_compiled_layer_launches_as_few_kernels_as_the_planner_says(num_adapters: int, backward: int) -> None:
    """In bf16: seven products (21 with LoRA on all of them), attention, and what Inductor makes of the rest."""
    register_packed_attention()
    sizes = {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = Qwen3Config(**sizes, head_dim=64, num_hidden_layers=1, vocab_size=64)
    model = Qwen3ForCausalLM._from_config(config, attn_implementation=PACKED_DOCUMENTS, dtype=torch.bfloat16)
    if num_adapters:
        # In bf16 as FSDP2 gathers them.
        fuse_products(get_peft_model(model, LoraConfig(r=8, target_modules="all-linear")).bfloat16())
    compile_layers(transformer_layers(model), Layout(recompute="selective"))
    torch._dynamo.reset()
    batch = packed_batch([100, 28, 60, 68], 2)
    _, codes = run_fw_bw_and_get_code(lambda: hidden_states(decoder_of(model), batch.inputs, is_compiled=True))
    # Of each graph, the calls in the function that runs it: libraries', torch's operations, generated kernels.
    kernel = re.compile(r"extern_kernels\.\w+\(|= torch\.ops\.[\w.]+\(|^\s+cpp_fused\w*\(", re.MULTILINE)
    numbers = [len(kernel.findall(code[code.index("def call(") :])) for code in codes]
    assert len(numbers) == 2
    assert numbers[0] == COMPILED.dense + num_adapters * COMPILED.adapter
    assert numbers[1] <= backward
