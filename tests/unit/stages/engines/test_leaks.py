"""Leaks of one packed document into the next are seen: by the probe, with real weights, in fp32 and in bf16.

In bf16, packed documents get to the bit what each gets alone, since both round states after each product; so a test
of equality says nothing before a model that leaks has failed it.
"""

import functools
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM
from transformers.models.lfm2 import modeling_lfm2

from stages.core.errors import ModelError
from stages.engines.fsdp.engine import FsdpEngine
from stages.engines.fsdp.model import TargetLogProbabilities, check_log_probabilities
from stages.engines.fsdp.packed import packed
from stages.engines.fsdp.probe import Verdict, probe
from stages.engines.mixers import has_mixers
from stages.engines.settings import AdamSettings, EngineSettings
from stages.models.facts import ModelFacts
from stages.models.layers import text_layers
from stages.parallel.layout import Layout
from stages.parallel.processes import joined_processes
from tests.zoo.models import tiny_config, tiny_model

LENGTHS = (12, 7, 30)
CPU = torch.device("cpu")
FAMILIES = ("lfm2", "qwen3_5_text", "mamba2")


def documents() -> tuple[Tensor, ...]:
    torch.manual_seed(0)
    return torch.randint(1, 49, (sum(LENGTHS),)).split(LENGTHS)


@functools.cache
def probed(family: str) -> tuple[Verdict, dict[str, Tensor]]:
    """Return the probe's verdict on a family, and the weights of its tiny model."""
    return probe(tiny_config(family), trust_remote_code=False), tiny_model(family).state_dict()


def model_of(family: str, dtype: torch.dtype, *, leaks: bool) -> TargetLogProbabilities:
    """Return a family's tiny model; if it leaks, one of its mixers does not know where documents end."""
    verdict, weights = probed(family)
    causal_lm = AutoModelForCausalLM.from_config(tiny_config(family), attn_implementation=verdict.attention)
    causal_lm.load_state_dict(weights)
    model = TargetLogProbabilities(causal_lm.to(dtype).eval(), verdict)
    if leaks:
        mixer = next(mixers_of(model))
        del mixer.forward
        assert not has_mixers([nn.ModuleList([mixer])])
    return model


def mixers_of(model: TargetLogProbabilities) -> Iterator[nn.Module]:
    classes = model.verdict.mixers
    return (one for layer in text_layers(model.causal_lm) for one in layer.children() if type(one) in classes)


@torch.no_grad()
def difference(model: TargetLogProbabilities) -> float:
    """Return the largest difference in nats between packed documents and each alone."""
    together = model(packed(documents()))
    alone = torch.cat([model(packed([one])) for one in documents()], dim=1)
    return (together - alone).abs().max().item()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("family", FAMILIES)
def test_one_mixer_without_boundaries_is_seen(family: str, dtype: torch.dtype) -> None:
    assert difference(model_of(family, dtype, leaks=False)) <= 2e-6
    assert difference(model_of(family, dtype, leaks=True)) > 0.05


@pytest.mark.parametrize("family", FAMILIES)
def test_one_mixer_without_boundaries_fails_the_check_of_real_weights(family: str) -> None:
    check_log_probabilities(model_of(family, torch.float32, leaks=False), CPU)
    with pytest.raises(ModelError, match="other log-probabilities to packed documents than to each alone"):
        check_log_probabilities(model_of(family, torch.float32, leaks=True), CPU)


class GatedConvolution(modeling_lfm2.Lfm2ShortConv):
    """Short convolution with a gate that begins at 0, so that a new model passes nothing through it."""

    def __init__(self, config, layer_idx):  # type: ignore[no-untyped-def]
        super().__init__(config, layer_idx)
        self.gate = nn.Parameter(torch.zeros(config.hidden_size))

    def forward(self, *given, **named):  # type: ignore[no-untyped-def]
        return super().forward(*given, **named) * self.gate


def test_a_gate_that_begins_at_0_hides_no_leak_from_the_probe(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(modeling_lfm2, "Lfm2ShortConv", GatedConvolution)
    verdict = probe(tiny_config("lfm2"), trust_remote_code=False)
    assert verdict.packs and verdict.mixers == {GatedConvolution}


@pytest.mark.parametrize("family", ["mamba2", "olmo2", "qwen3_5_text"])
def test_training_in_bf16_computes_what_transformers_in_bf16_does(family: str, tmp_path: Path) -> None:
    """FSDP2 would cast what a layer gets: OLMo's angles and Mamba 2's residual states differed by 0.02 and 0.07."""
    tiny_model(family).save_pretrained(tmp_path)
    batch = packed(documents())
    with joined_processes() as device:
        engine = FsdpEngine(ModelFacts(tmp_path), EngineSettings(Layout(), "bf16", AdamSettings(1e-3)), device)
        found = engine.predictions(batch)[0]
        engine.close()
    attention = None if family == "mamba2" else "sdpa"
    plain = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16, attn_implementation=attention).eval()
    with torch.no_grad():
        logits = torch.cat([plain(input_ids=one[None], use_cache=False).logits for one in documents()], dim=1)
    expected = TargetLogProbabilities.of_logits(plain, logits, batch)  # type: ignore[arg-type]
    assert (found - expected).abs().max() <= 2e-6
