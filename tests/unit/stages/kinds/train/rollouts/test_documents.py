"""Sampled completions train equally under every packing, and each token keeps its sampling log-probability."""

import json
from dataclasses import asdict
from pathlib import Path

import pytest
import torch

from stages.data.batch import IGNORED
from stages.kinds.train.rollouts.documents import AnsweredPrompt, Packing
from stages.kinds.train.rollouts.probe import Probe

DOCUMENTS = [
    AnsweredPrompt([1, 2, 3], [4, 5], [-0.25, -0.5], 1.0),
    AnsweredPrompt([6], [7, 8, 9], [-1.0, -2.0, -3.0], -1.0),
    AnsweredPrompt([1, 2], [3], [-4.0], 0.5, is_learned=False),
    AnsweredPrompt([9, 8, 7, 6], [5, 4, 3], [-0.125] * 3, 0.25),
]


@pytest.mark.parametrize("packing", [True, False], ids=["packed", "alone"])
@pytest.mark.parametrize("size", [1, 2, 3])
def test_shares_hold_every_completion_once_with_what_belongs_to_it(packing: bool, size: int) -> None:
    one = Packing(sequence_length=8, most_tokens=8, packing=packing, micro_batch_size=2, padding_token=0)
    shares = [one.share(DOCUMENTS, rank, size) for rank in range(size)]
    assert len({len(share) for share in shares}) == 1, "processes wait for one another in every micro-batch"
    found = []
    for batch in (packed.batch for share in shares for packed in share):
        assert batch.signal.rollouts is not None
        assert batch.inputs.input_ids.shape[0] == 2
        for number in range(batch.documents.count):
            inside = batch.documents.ids == number
            learned = inside & batch.signal.has_target
            assert batch.signal.rollouts.server_log_probabilities is not None
            said = batch.signal.rollouts.server_log_probabilities
            advantage = batch.signal.rollouts.advantages[number].item()
            found.append(
                (
                    batch.inputs.input_ids[inside].tolist(),
                    batch.signal.targets[learned].tolist(),
                    said[learned].tolist(),
                    advantage,
                )
            )
            assert not said[inside & ~batch.signal.has_target].any()
    expected = [
        (
            one.prompt + one.completion,
            one.completion if one.is_learned else [],
            one.log_probabilities if one.is_learned else [],
            one.advantage,
        )
        for one in DOCUMENTS
    ]
    assert sorted(found) == sorted(expected)


@pytest.mark.parametrize(("length", "is_compiled", "width"), [(256, False, 64), (256, True, 256), (8, False, 8)])
def test_packed_rows_are_as_wide_as_needed_unless_each_width_would_compile_layers_again(length, is_compiled, width):
    packing = Packing(length, 8, packing=True, micro_batch_size=2, padding_token=0, is_compiled=is_compiled)
    (batch,) = (packed.batch for packed in packing.share(DOCUMENTS[:2], 0, 1))
    assert batch.inputs.input_ids.shape == (2, width)


def test_a_row_is_as_wide_as_its_packing_says() -> None:
    packed = Packing(8, 8, True, 1, 0).share(DOCUMENTS[:1], 0, 1)
    alone = Packing(8, 8, False, 1, 0, temperature=0.5).share(DOCUMENTS[:1], 0, 1)
    assert [one.batch.inputs.input_ids.shape for one in packed] == [(1, 8)]
    assert [(one.batch.inputs.input_ids.shape, one.batch.signal.temperature) for one in alone] == [((1, 5), 0.5)]
    assert torch.equal(alone[0].batch.signal.targets, torch.tensor([[IGNORED, IGNORED, 4, 5, IGNORED]]))


def test_a_probe_is_of_no_temperature_as_what_servers_give_to_tokens_that_they_are_shown(tmp_path: Path) -> None:
    (tmp_path / "probe.json").write_text(
        json.dumps({"documents": [asdict(one) for one in DOCUMENTS], "untrained": [0.0] * 4})
    )
    packing = Packing(32, 8, packing=True, micro_batch_size=1, padding_token=0, temperature=0.7)
    assert packing.batch([DOCUMENTS]).batch.signal.temperature == 0.7
    assert Probe.read(tmp_path / "probe.json", packing).batch.signal.temperature == 1
