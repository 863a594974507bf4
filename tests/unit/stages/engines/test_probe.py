"""The probe lets documents be packed where none sees another, and names what it measured where they do."""

from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, CodeGenPreTrainedModel

from stages.core.errors import ModelError
from stages.engines.attention import PACKED_DOCUMENTS
from stages.engines.fsdp.model import TargetLogProbabilities, check_log_probabilities
from stages.engines.fsdp.packed import packed
from stages.engines.fsdp.probe import LARGEST_SLICE, Verdict, _narrowed, _Slices, probe
from stages.models.layers import transformer_layers
from tests.zoo.models import tiny_config

PACKED = (
    "llama", "mistral", "qwen2", "qwen3", "gemma2", "gemma3_text", "phi3", "cohere2", "olmo3", "apertus", "gpt2", "opt",
    "mixtral", "qwen3_moe", "gpt_oss", "glm4_moe", "deepseek_v3", "gemma3", "gemma4",
)  # fmt: skip
WITH_MIXERS = {
    "lfm2": {"Lfm2ShortConv"}, "mamba": {"MambaMixer"}, "bamba": {"BambaMixer"}, "falcon_h1": {"FalconH1Mixer"},
    "qwen3_next": {"Qwen3NextGatedDeltaNet"}, "qwen3_5": {"Qwen3_5GatedDeltaNet"},
    "rwkv": {"RwkvSelfAttention", "RwkvFeedForward"},
}  # fmt: skip
"""Families that are packed but for modules which carry something along the sequence, by the classes of these."""
AS_ROWS = ("nemotron", "bloom", "falcon", "llama4_text", "llama4")
"""Families whose documents are packed, or are rows of their own: chosen so that each reason occurs."""
QWEN3_30B = {
    "vocab_size": 151936, "hidden_size": 2048, "intermediate_size": 6144, "num_attention_heads": 32,
    "num_key_value_heads": 4, "head_dim": 128, "num_hidden_layers": 48, "num_experts": 128, "num_experts_per_tok": 8,
    "moe_intermediate_size": 768,
}  # fmt: skip


def verdict_on(family: str, **fields: Any) -> Verdict:
    return probe(tiny_config(family, **fields), trust_remote_code=False)


@pytest.mark.parametrize("family", [*PACKED, *WITH_MIXERS, *AS_ROWS])
def test_documents_are_packed_where_that_is_right(family: str) -> None:
    verdict = verdict_on(family)
    assert verdict.packs == (family not in AS_ROWS)
    assert {mixer.__name__ for mixer in verdict.mixers} == WITH_MIXERS.get(family, set())


def test_a_short_convolution_that_leaks_into_the_next_document_is_found() -> None:
    """LFM2's convolutions see the two tokens before: packed, the end of one document changes the start of the next.

    A new model's small weights hide that from a comparison of log-probabilities within 1e-3 nats.
    """
    config = tiny_config("lfm2")
    torch.manual_seed(0)
    causal_lm = AutoModelForCausalLM.from_config(config, attn_implementation=PACKED_DOCUMENTS).eval()
    verdict = probe(config, trust_remote_code=False)
    leaking = TargetLogProbabilities(causal_lm, Verdict(verdict.attention, ""))
    check_log_probabilities(leaking, torch.device("cpu"))
    assert verdict.sentence.startswith("documents train packed, Lfm2ShortConv on each by itself: other tokens in one")
    assert "(layers: conv, full_attention); packed: other tokens in one document change the next by" in verdict.sentence


@torch.no_grad()
def test_states_that_are_in_fp32_go_through_a_head_in_bf16() -> None:
    verdict = verdict_on("mamba2")
    options = {"dtype": torch.bfloat16, "attn_implementation": verdict.attention}
    model = TargetLogProbabilities(AutoModelForCausalLM.from_config(tiny_config("mamba2"), **options).eval(), verdict)
    batch = packed([torch.arange(1, 20)])
    assert torch.allclose(model(batch), model(batch, by_transformers=True), atol=1e-5)


def test_chunks_that_are_longer_than_the_probes_documents_are_found() -> None:
    """Llama 4's chunks of 8,192 tokens are shortened, also in a model that sees, whose text has a config of its own."""
    text = {**tiny_config("llama4").text_config.to_dict(), "attention_chunk_size": 8192}
    assert verdict_on("llama4", text_config=text).attention == "sdpa"


def test_an_architecture_that_looks_ahead_is_refused_with_what_was_measured() -> None:
    with pytest.raises(ModelError, match=r"cannot be trained: .* packed: .* as rows of their own, with eager: .* nats"):
        verdict_on("gemma3_text", use_bidirectional_attention=True)


def test_every_type_of_layer_is_seen_also_one_that_comes_late() -> None:
    types = [*["sliding_attention"] * 5, "full_attention"] * 2
    verdict = verdict_on("gemma3_text", num_hidden_layers=12, layer_types=types)
    assert verdict.packs
    assert verdict.sentence.endswith("(layers: full_attention, sliding_attention)")


@torch.no_grad()
def test_a_large_model_is_probed_on_a_narrow_slice_of_its_first_layers() -> None:
    config = tiny_config("qwen3_moe", **QWEN3_30B)
    slices = _Slices(next(_narrowed(config)), cuts_layers=True, trust_remote_code=False)
    causal_lm = slices._build("eager")
    assert len(transformer_layers(causal_lm)) == 2
    assert sum(one.numel() for one in causal_lm.parameters()) < LARGEST_SLICE / 8
    assert config.num_hidden_layers == 48


def test_a_slice_of_a_model_whose_layers_differ_in_heads_is_narrow() -> None:
    """Gemma 4's global layers have fewer heads of keys, and wider ones."""
    types = [*["sliding_attention"] * 5, "full_attention"]
    fields = {"hidden_size": 4096, "num_attention_heads": 32, "num_key_value_heads": 16, "head_dim": 64}
    fields |= {"global_head_dim": 128, "num_global_key_value_heads": 8, "attention_k_eq_v": True}
    config = AutoConfig.for_model("gemma4_text", num_hidden_layers=6, layer_types=types, **fields)
    small = next(_narrowed(config)).per_layer_config
    assert [(one.num_attention_heads, one.num_key_value_heads, one.head_dim) for one in small[4:]] == [
        (2, 1, 64),
        (2, 1, 128),
    ]
    assert probe(config, trust_remote_code=False).packs


def test_a_slice_is_narrow_where_few_heads_are_shared_and_each_layer_has_a_size_of_its_own() -> None:
    small = next(_narrowed(AutoConfig.for_model("gemma3n_text")))  # 8 heads, 2 of keys and values
    assert (small.hidden_size, small.num_attention_heads, small.num_key_value_heads) == (256, 1, 1)
    assert {*small.intermediate_size} == {128}


def test_a_config_without_the_usual_fields_is_probed() -> None:
    fields = {"vocab_size": 64, "n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 64, "rotary_dim": 8}
    found = probe(AutoConfig.for_model("codegen", **fields), trust_remote_code=False).attention
    assert found == (PACKED_DOCUMENTS if CodeGenPreTrainedModel._supports_attention_backend else "eager")


def test_random_numbers_of_a_training_stay_as_they_are() -> None:
    torch.manual_seed(7)
    expected = torch.rand(3)
    torch.manual_seed(7)
    verdict_on("qwen3")
    assert torch.equal(torch.rand(3), expected)
