"""Recorded predictions are compared with later ones of the same model, as far as older records have the figures."""

import json

import pytest
import torch

from stages.core.errors import ModelError
from stages.models.recorded import (
    RECORD,
    Predicted,
    RecordedDocument,
    ToolPrompt,
    differences,
    read_record,
    read_tool_prompts,
    write_record,
)

TARGETS = [-100, 3, 1, 4]


def predicted(logits):
    chosen = logits.log_softmax(1).gather(1, torch.tensor(TARGETS[1:])[:, None]).squeeze(1)
    return Predicted(chosen.tolist(), logits.argmax(1).tolist())


def recorded(logits):
    one = predicted(logits)
    return RecordedDocument([2, 7, 3, 1], TARGETS, sum(one.log_probabilities), one.log_probabilities, one.greedy)


@pytest.fixture
def logits():
    torch.manual_seed(0)
    return torch.randn(3, 6)


def test_the_same_predictions_differ_in_nothing(logits):
    found = differences([predicted(logits)], [recorded(logits)])
    assert found.metrics() == {
        "max_abs_logprob_difference": pytest.approx(0, abs=1e-6),
        "mean_abs_logprob_difference": pytest.approx(0, abs=1e-6),
        "kl_from_training_nats_per_token": 0,
        "same_greedy_fraction": 1,
    }


def test_kl_is_a_lower_bound_and_that_of_two_outcomes(logits):
    other = logits + 0.3 * torch.randn(3, 6)
    p, q = logits.softmax(1), other.softmax(1)
    exact = (p * (p / q).log()).sum(1).mean().item()
    rows, targets = torch.arange(3), torch.tensor(TARGETS[1:])
    of_two = [torch.stack([one[rows, targets], 1 - one[rows, targets]]) for one in (p, q)]
    expected = (of_two[0] * (of_two[0] / of_two[1]).log()).sum(0).mean().item()
    found = differences([predicted(other)], [recorded(logits)])
    assert found.kl == pytest.approx(expected, rel=1e-4)
    assert 0 < found.kl < exact


def test_other_greedy_tokens_are_counted(logits):
    other = logits.clone()
    other[0, (int(logits[0].argmax()) + 1) % 6] = 9.0
    assert differences([predicted(other)], [recorded(logits)]).same_greedy == pytest.approx(2 / 3)


def test_certain_tokens_give_no_infinite_kl(logits):
    certain = logits.clone()
    certain[torch.arange(3), torch.tensor(TARGETS[1:])] = 60.0
    for one, other in ((logits, certain), (certain, logits), (certain, certain)):
        assert differences([predicted(other)], [recorded(one)]).kl < 30


def test_a_record_is_read_as_it_was_written_and_one_of_before_tells_less(tmp_path, logits):
    asked = [{"role": "user", "content": "1 + 2?"}]
    prompt = ToolPrompt(messages=asked, tools=[{"type": "function"}], variables={"a": 1}, token_ids=[3, 1])
    write_record(tmp_path, [recorded(logits)], "float32", [prompt])
    assert read_record(tmp_path) == [recorded(logits)]
    assert read_tool_prompts(tmp_path) == [prompt]

    content = json.loads((tmp_path / RECORD).read_text())
    del content["tool_prompts"]
    for name in ("greedy", "log_probabilities"):
        del content["documents"][0][name]
    (tmp_path / RECORD).write_text(json.dumps(content))
    found = differences([predicted(logits)], read_record(tmp_path))
    assert found.metrics().keys() == {"max_abs_logprob_difference", "mean_abs_logprob_difference"}


@pytest.mark.parametrize("content", ["", '{"documents": [{"input_ids": [1]}]}', '{"documents": [7]}'])
def test_a_damaged_record_is_named(tmp_path, content):
    (tmp_path / RECORD).write_text(content)
    with pytest.raises(ModelError, match="train the stage again"):
        read_record(tmp_path)
