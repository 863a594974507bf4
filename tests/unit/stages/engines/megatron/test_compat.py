"""Patches of Megatron-core for CPUs do not affect other callers of the patched functions."""

import pytest
import torch

from stages.engines.megatron import compat
from stages.engines.megatron.compat import MEGATRON_VERSION, prepare_megatron
from stages.parallel.processes import joined_processes

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="nothing is patched where CUDA is")


@pytest.fixture(scope="module", autouse=True)
def prepared():
    prepare_megatron()


def test_megatron_sees_the_cpu_where_it_asks_for_cuda():
    from megatron.core.transformer.moe import token_dispatcher

    seen = token_dispatcher.torch
    assert seen.cuda.current_device() == "cpu"
    assert seen.zeros(2, device="cuda").device.type == "cpu"
    assert seen.empty(2, device=seen.cuda.current_device()).device.type == "cpu"
    assert seen.cuda.current_stream().record_event().synchronize() is not None


def test_torch_is_itself_for_everybody_else():
    with pytest.raises((RuntimeError, AssertionError)):
        torch.zeros(2, device="cuda")
    with pytest.raises((RuntimeError, AssertionError)):
        torch.zeros(2).cuda()
    assert torch.zeros(2).type() == "torch.FloatTensor"


def test_groups_of_the_same_ranks_are_one_until_the_processes_part():
    from megatron.core.parallel_state import torch as seen

    groups = []
    for _ in range(2):
        with joined_processes():
            groups.append(seen.distributed.new_group([0]))
            assert seen.distributed.new_group([0]) is groups[-1]
    assert groups[0] is not groups[1]


def test_preparing_twice_patches_once():
    patched = torch.Tensor.type
    prepare_megatron()
    assert torch.Tensor.type is patched


def test_another_version_is_refused(monkeypatch):
    monkeypatch.setattr("megatron.core.__version__", "9.9")
    monkeypatch.setattr(compat, "_is_prepared", False)
    with pytest.raises(AssertionError, match=f"are for megatron-core {MEGATRON_VERSION}, 9.9 is installed"):
        prepare_megatron()
