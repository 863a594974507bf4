"""A training batch has two halves: inputs for the forward pass, and a signal (such as targets) for the loss."""

import ast
from dataclasses import fields
from pathlib import Path

import pytest
import torch

from stages.data.batch import IGNORED, Batch, Candidates, Documents, Rollouts

ROOT = Path(__file__).parents[4]
METHODS = ROOT / "stages" / "kinds" / "train" / "methods"
CHANGES = {"method.py", "targets.py"}
"""Modules of training methods that may use a whole batch, since they change batches before the forward pass."""


def make_batch() -> Batch:
    ids = torch.tensor([[0, 0, 1, 2]])
    rollouts = Rollouts(torch.ones(2), torch.zeros(1, 4))
    zeros = torch.zeros(1, 4, dtype=torch.int64)
    return Batch.of(zeros, zeros + IGNORED, zeros, Documents(ids, 2, [2, 1, 1]), rollouts=rollouts, temperature=0.5)


def test_both_groups_go_to_a_device_with_the_same_documents() -> None:
    moved = make_batch().to("meta")
    assert moved.inputs.documents is moved.signal.documents
    assert moved.signal.rollouts
    tensors = (moved.inputs.input_ids, moved.inputs.position_ids, moved.documents.ids, moved.signal.targets)
    assert all(one.is_meta for one in (*tensors, moved.signal.rollouts.advantages))
    assert (moved.documents.count, moved.signal.temperature) == (2, 0.5)


def test_all_tensors_are_pinned_and_documents_stay_shared(monkeypatch: pytest.MonkeyPatch) -> None:
    """All tensors of a batch are pinned (here: marked, as there is no accelerator); `documents` stay one object."""
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: tensor.as_subclass(Pinned))
    batch = make_batch().with_signal(
        candidates=Candidates(torch.zeros(1, 4, 3, dtype=torch.int64), torch.zeros(1, 4, 3))
    )
    pinned = batch.pinned()
    assert pinned.inputs.documents is pinned.signal.documents
    inputs, signal = pinned.inputs, pinned.signal
    assert signal.rollouts and signal.candidates
    tensors = [inputs.input_ids, inputs.position_ids, signal.documents.ids, signal.targets]
    tensors += [signal.rollouts.advantages, signal.rollouts.old_log_probabilities]
    tensors += [signal.candidates.tokens, signal.candidates.log_probabilities]
    assert all(isinstance(one, Pinned) for one in tensors)
    assert torch.equal(inputs.input_ids, batch.inputs.input_ids) and signal.temperature == 0.5


class Pinned(torch.Tensor):
    """Tensor class that stands for pinned tensors on machines without an accelerator."""


def test_a_loss_takes_the_signal_and_forward_the_inputs() -> None:
    assert [field.name for field in fields(Batch)] == ["inputs", "signal"]
    losses = [file for file in METHODS.glob("*.py") if file.name not in CHANGES]
    named = {
        file.name
        for file in (*losses, ROOT / "stages" / "engines" / "attention.py")
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.Name) and node.id == "Batch"
    }
    assert not named, "these get a whole batch, of which they need one group"
