"""Micro-batches that are prepared ahead are put into pinned memory on CUDA and XPU devices only."""

from threading import current_thread
from types import SimpleNamespace
from weakref import finalize

import pytest
import torch

from stages.data.batch import IGNORED, Batch, Documents
from stages.kinds.train.batches import prefetched
from stages.kinds.train.loop import _shares


def make_batch(step: int) -> Batch:
    tokens = torch.full((1, 4), step)
    return Batch.of(tokens, tokens * 0 + IGNORED, torch.arange(4)[None], Documents(tokens * 0, 1, [4]))


@pytest.mark.parametrize(
    ("device", "made_ahead", "pinned"),
    [("cuda", True, True), ("xpu", True, True), ("cuda", False, False), ("mps", True, False), ("cpu", True, False)],
)
def test_batches_are_pinned_where_the_device_copies_from_there(
    device: str, made_ahead: bool, pinned: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[torch.Tensor] = []
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: asked.append(tensor) or tensor.clone())
    made = {step: [make_batch(step), make_batch(step)] for step in (1, 2, 3)}
    batches = SimpleNamespace(micro_batches=made.__getitem__, made_ahead=made_ahead)
    flops = SimpleNamespace(training=lambda *_: 1.0)
    run = SimpleNamespace(batches=batches, engine=SimpleNamespace(device=torch.device(device), flops=flops))
    for step, share in zip((1, 2, 3), _shares(run, range(1, 4)), strict=True):
        for batch, original in zip(share.micro_batches, made[step], strict=True):
            assert (batch is original) is not pinned
            assert torch.equal(batch.inputs.input_ids, original.inputs.input_ids)
    num_tensors = 5  # ids of tokens, of positions and of documents, targets, and where they are
    assert len(asked) == (3 * 2 * num_tensors if pinned else 0)


def test_another_thread_gives_the_memory_of_used_batches_back() -> None:
    freed_by: list[str] = []

    def load(step: int) -> Batch:
        batch = make_batch(step)
        finalize(batch, lambda: freed_by.append(current_thread().name))
        return batch

    for batch in prefetched(load, range(3)):
        del batch
    assert len(freed_by) == 3
    assert all(name.startswith("batches") for name in freed_by)
