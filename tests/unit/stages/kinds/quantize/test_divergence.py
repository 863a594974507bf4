"""KL divergence and perplexity of a quantized model equal their definitions."""

import math

import pytest
import torch
from transformers import AutoModelForCausalLM

from stages.kinds.quantize.divergence import NUM_WORST, Divergence, measure_divergence
from stages.models.recorded import read_record
from tests.mergeable import make_base, write_record


def logits(seed, num_tokens=50, vocabulary=11):
    return torch.randn(num_tokens, vocabulary, generator=torch.Generator().manual_seed(seed))


def measured(reference, quantized, next_tokens):
    divergence = Divergence()
    divergence.add(reference, quantized, next_tokens)
    return divergence


def test_a_model_does_not_diverge_from_itself():
    found = measured(logits(0), logits(0), torch.zeros(50, dtype=torch.int64)).metrics()
    assert found["kl_nats_per_token"] == 0
    assert found["perplexity_before"] == found["perplexity_after"]
    assert found["same_choice_fraction"] == 1


def test_kl_is_that_of_the_definition():
    reference, quantized = logits(1), logits(2)
    p, q = reference.double().softmax(-1), quantized.double().softmax(-1)
    expected = (p * (p / q).log()).sum(-1).mean().item()
    found = measured(reference, quantized, torch.zeros(50, dtype=torch.int64)).metrics()
    assert found["kl_nats_per_token"] == pytest.approx(expected, rel=1e-5)


def test_shifted_logits_are_the_same_model():
    shifted = logits(3) + 7.5
    found = measured(logits(3), shifted, torch.zeros(50, dtype=torch.int64)).metrics()
    assert found["kl_nats_per_token"] == pytest.approx(0, abs=1e-6)


def test_perplexity_of_a_clueless_model_is_its_vocabulary():
    found = measured(torch.zeros(50, 11), logits(4), torch.zeros(50, dtype=torch.int64)).metrics()
    assert found["perplexity_before"] == pytest.approx(11, rel=1e-5)


def test_chunks_add_up_to_the_whole():
    reference, quantized, tokens = logits(5), logits(6), torch.arange(50) % 11
    whole, parts = measured(reference, quantized, tokens), Divergence()
    for chunk in zip(reference.split(7), quantized.split(7), tokens.split(7), strict=True):
        parts.add(*chunk)
    assert parts.metrics() == pytest.approx(whole.metrics(), rel=1e-5)
    assert [found.token for found in parts.worst] == [found.token for found in whole.worst]


def test_the_worst_predictions_are_kept_worst_first():
    reference = torch.zeros(50, 11)
    quantized = torch.zeros(50, 11)
    quantized[17, 3] = 20.0
    quantized[31, 3] = 10.0
    worst = measured(reference, quantized, torch.arange(50) % 11).worst
    assert len(worst) == NUM_WORST
    assert [found.token for found in worst[:2]] == [17 % 11, 31 % 11]


def test_broken_logits_show_as_no_number():
    broken = logits(7)
    broken[3, 2] = float("nan")
    assert math.isnan(measured(logits(7), broken, torch.zeros(50, dtype=torch.int64)).metrics()["kl_nats_per_token"])


def test_what_training_recorded_is_compared_with(tmp_path):
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    make_base(tmp_path, **sizes, num_attention_heads=2, num_key_value_heads=1, head_dim=16)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.float32)
    write_record(tmp_path, model)
    model.model.layers[1].mlp.down_proj.weight.data *= 1.5
    model.save_pretrained(other := tmp_path / "other")

    for folder, least, most in ((tmp_path / "model", 0, 1e-5), (other, 1e-4, 1)):
        samples, evaluated = [[1, 2, 3]], [[True] * 3]
        options = {"recorded": read_record(tmp_path), "trust_remote_code": False, "report": lambda done, total: None}
        found = measure_divergence(tmp_path / "model", folder, samples, evaluated, **options).metrics()
        assert least <= found["mean_abs_logprob_difference"] <= found["max_abs_logprob_difference"] < most
