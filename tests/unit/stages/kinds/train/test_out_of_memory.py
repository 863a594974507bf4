"""Out-of-memory errors name the predicted memory and the settings that would lower it; other errors are unchanged."""

import pytest
import torch

from stages.core.errors import ResourceError
from stages.kinds.train.out_of_memory import explained_out_of_memory
from tests.train_stage import make_config


def message_of(config, predicted_gib=None):
    """Return the out-of-memory error message for an allocation that torch refuses under a train config."""
    with pytest.raises(ResourceError) as refused, explained_out_of_memory(config, predicted_gib):
        torch.empty(2**60, dtype=torch.uint8)
    return str(refused.value)


def test_a_refusal_of_torch_on_a_cpu_says_layout_prediction_and_knobs():
    config = make_config(engine="megatron", layout={"tp": 2, "micro_batch_size": 4})
    message = message_of(config, 1.25)
    assert "rank 0 ran out of memory under the layout megatron" in message
    assert "predicted 1.2 GiB a process" in message
    assert "lower layout.micro_batch_size (now 4), layout.recompute: full (now none)" in message
    assert "layout.tp (now 2)" in message
    assert "cpu_offload" not in message


def test_knobs_that_are_turned_already_are_not_named():
    layout = {"micro_batch_size": 1, "recompute": "full", "cpu_offload": False}
    message = message_of(make_config(layout=layout))
    assert "micro_batch_size" not in message
    assert "recompute" not in message.partition("To need less")[2]
    assert "raise layout.dp_shard (now 1), layout.cpu_offload: true" in message
    assert "predicted" not in message


@pytest.mark.parametrize("error", [MemoryError(), torch.OutOfMemoryError("CUDA out of memory")], ids=["host", "gpu"])
def test_every_allocator_is_understood(error):
    with pytest.raises(ResourceError, match="ran out of memory"), explained_out_of_memory(make_config(), None):
        raise error


def test_other_errors_pass():
    with pytest.raises(RuntimeError, match="a bug of ours"), explained_out_of_memory(make_config(), None):
        raise RuntimeError("a bug of ours")
