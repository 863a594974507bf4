"""In bf16, every family of text gives the losses that Transformers gives in bf16."""

from pathlib import Path

import pytest
import torch
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM

from stages.engines.fsdp.engine import FsdpEngine
from stages.engines.fsdp.packed import packed
from stages.engines.settings import AdamSettings, EngineSettings
from stages.models.facts import ModelFacts
from stages.parallel.layout import Layout
from tests.zoo.proofs import one_process, save_family
from tests.zoo.text import TEXT_FAMILIES

FULL_PRECISION_WITHIN = ("olmo", "mamba2", "ernie4_5")
"""Families whose layers pass fp32 on, or compute in it, when their weights are bf16."""


@pytest.mark.parametrize(
    "family",
    [one if one in FULL_PRECISION_WITHIN else pytest.param(one, marks=pytest.mark.nightly) for one in TEXT_FAMILIES],
)
def test_bf16_gives_the_losses_of_transformers_in_bf16(family: str, tmp_path: Path) -> None:
    """Losses are those of its SDPA or eager attention, or nearer to them than bf16 is to fp32 (experts of gpt-oss)."""
    save_family(family, tmp_path)
    torch.manual_seed(0)
    documents = [torch.randint(3, 49, (32,)) for _ in range(8)]
    settings, device = EngineSettings(Layout(), "bf16", AdamSettings(1e-3)), torch.device("cpu")
    with one_process():
        engine = FsdpEngine(ModelFacts(tmp_path), settings, device)
        found = engine.document_log_probabilities(packed(documents)) / -31
        engine.close()
    exact = plain_losses(tmp_path, documents, torch.float32, "eager")
    assert exact is not None
    of_bf16 = [plain_losses(tmp_path, documents, torch.bfloat16, attention) for attention in ("eager", "sdpa")]
    differences = [(root_mean_square(found - one), root_mean_square(one - exact)) for one in of_bf16 if one is not None]
    assert any(ours < max(1e-3, of_dtype) for ours, of_dtype in differences), differences


def plain_losses(
    folder: Path, documents: list[torch.Tensor], dtype: torch.dtype, attention: str
) -> torch.Tensor | None:
    """Return Transformers' mean loss of each document by itself, [documents]; None if a family lacks the attention."""
    try:
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation=attention).eval()
    except ValueError as error:
        assert "scaled_dot_product_attention" in str(error)
        return None
    with torch.no_grad():
        logits = [model(input_ids=one[None]).logits[0, :-1].float() for one in documents]
    return torch.stack([cross_entropy(of_one, one[1:]) for of_one, one in zip(logits, documents, strict=True)])


def root_mean_square(values: torch.Tensor) -> float:
    return values.square().mean().sqrt().item()
