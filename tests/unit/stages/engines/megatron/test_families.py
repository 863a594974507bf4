"""Architectures that Megatron would compute wrongly are refused; the error lists the supported ones."""

import re

import pytest

from stages.core.errors import ModelError
from stages.engines.megatron.families import MAPPINGS
from stages.models.facts import ModelFacts
from stages.parallel.engines.megatron import FAMILIES, MegatronRules

LLAMA = {
    "model_type": "llama", "num_hidden_layers": 2, "hidden_size": 8, "intermediate_size": 16,
    "num_attention_heads": 2, "num_key_value_heads": 2, "vocab_size": 13,
}  # fmt: skip
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8}


def test_every_family_has_a_mapping_of_its_weights():
    assert tuple(MAPPINGS) == FAMILIES


def test_every_family_is_supported_as_it_usually_is():
    for family in FAMILIES:
        MegatronRules().shape_of(ModelFacts({**LLAMA, "model_type": family, **EXPERTS}))


def test_another_family_is_refused_with_the_list_of_families_and_the_other_engine():
    with pytest.raises(ModelError) as raised:
        MegatronRules().shape_of(ModelFacts({**LLAMA, "model_type": "gemma3"}))
    message = str(raised.value)
    assert all(part in message for part in ("'gemma3'", *FAMILIES, "`engine: fsdp`", "any causal language model"))


@pytest.mark.parametrize(
    ("peculiarity", "named"),
    [
        ({"mlp_bias": True}, "mlp_bias"),
        ({"attention_bias": True}, "attention_bias"),
        ({"hidden_act": "gelu"}, "hidden_act gelu"),
        ({"attention_dropout": 0.1}, "attention_dropout 0.1"),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "rope_type dynamic"),
        ({"rope_parameters": {"rope_type": "longrope"}}, "rope_type longrope"),
    ],
)
def test_what_the_mapping_would_leave_out_is_refused(peculiarity, named):
    with pytest.raises(ModelError, match=f"not one with .*{re.escape(named)}.*engine: fsdp"):
        MegatronRules().shape_of(ModelFacts({**LLAMA, **peculiarity}))
