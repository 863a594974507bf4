"""The check that a sharded model predicts like the unsharded one leaves no gathered weights in memory."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from copy import deepcopy
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from transformers import LlamaConfig, LlamaForCausalLM

from stages.engines.fsdp.model import find_weights
from stages.engines.fsdp.parallelize import data_parallel_mesh, fsdp_modules, parallelize
from stages.engines.fsdp.shards import check_sharded, drop_weights, read_shards
from stages.parallel.layout import Layout

CPU = torch.device("cpu")


@pytest.fixture
def one_process() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    gc.disable()  # cycles of modules and FSDP's hooks keep a twin until a collection
    try:
        yield
    finally:
        gc.enable()
        dist.destroy_process_group()


def test_what_the_twin_gathers_is_freed_with_the_check(one_process: None, tmp_path: Path) -> None:
    torch.manual_seed(0)
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=4)).save_pretrained(tmp_path)
    layout = Layout()
    mesh = data_parallel_mesh(layout, CPU)
    model, files = find_weights(tmp_path, device=CPU, trust_remote_code=False)
    drop_weights(model, list(model.parameters()))
    twin = deepcopy(model)
    parallelize(model, layout, mesh, torch.bfloat16)
    read_shards(model.causal_lm, files, CPU)
    check_sharded(model, twin, layout, mesh, CPU)
    gathered = [
        tensor
        for module in fsdp_modules(twin)
        for group in module._get_fsdp_state()._fsdp_param_groups
        for weight in group.fsdp_params
        for tensor in weight.all_gather_outputs
    ]
    assert len(gathered) == len(list(model.parameters()))
    assert sum(tensor.untyped_storage().size() for tensor in gathered) == 0
