"""Weights of one process: read from files, checked against Transformers, and copied only where their dtype differs."""

import gc
from collections.abc import Iterator
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers import LlamaConfig, LlamaForCausalLM

from stages.adapters.config import AdapterConfig
from stages.engines.fsdp.engine import FsdpEngine
from stages.engines.fsdp.model import find_weights
from stages.engines.fsdp.parallelize import device_mesh, parallelize
from stages.engines.fsdp.shards import check_sharded, drop_weights, read_shards
from stages.engines.settings import AdamSettings, EngineSettings
from stages.models.facts import ModelFacts
from stages.parallel.layout import Layout

CPU = torch.device("cpu")
LORA = {"adapter": AdapterConfig(rank=2)}


@pytest.fixture
def one_process() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    gc.disable()  # cycles of modules and FSDP's hooks keep a twin until a collection
    try:
        yield
    finally:
        gc.enable()
        dist.destroy_process_group()


def test_what_the_twin_computes_with_is_freed_with_the_check(one_process: None, tmp_path: Path) -> None:
    torch.manual_seed(0)
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=4)).save_pretrained(tmp_path)
    layout = Layout()
    mesh = device_mesh(layout, CPU)
    model, files = find_weights(tmp_path, trust_remote_code=False)
    drop_weights(model, list(model.parameters()))
    twin = deepcopy(model)
    parallelize(model, layout, mesh, torch.bfloat16)
    read_shards(model.causal_lm, files, CPU)
    check_sharded(model, twin, layout, mesh, CPU)
    assert all(one.is_meta for one in twin.parameters())
    assert not any(one.is_meta for one in model.parameters())


@pytest.mark.parametrize(
    ("precision", "fields", "copied"), [("fp32", {}, "nothing"), ("bf16", {}, "everything"), ("bf16", LORA, "factors")]
)
def test_one_process_copies_only_what_it_computes_with_in_another_dtype(
    one_process: None, tmp_path: Path, precision: Any, fields: dict[str, Any], copied: str
) -> None:
    """One process uses weights as they are, without FSDP2's copy before each layer, unless their dtype is another."""
    torch.manual_seed(0)
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=4)).save_pretrained(tmp_path)
    engine = FsdpEngine(ModelFacts(tmp_path), EngineSettings(Layout(), precision, AdamSettings(1e-2), **fields), CPU)
    names = {name for name, one in engine._model.named_parameters() if isinstance(one, DTensor)}
    everything = {name for name, _ in engine._model.named_parameters()}
    factors = {name for name in everything if ".lora_" in name}
    assert names == {"nothing": set(), "everything": everything, "factors": factors}[copied]


def test_shards_in_host_memory_stay_there_though_the_mesh_is_of_gpus(tmp_path: Path) -> None:
    torch.manual_seed(0)
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1}
    LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=4)).save_pretrained(tmp_path)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=1)
    try:
        model, files = find_weights(tmp_path, trust_remote_code=False)
        drop_weights(model, list(model.parameters()))
        # As `cpu_offload` has it: there is no GPU here, to which DTensor would otherwise move them.
        mesh = DeviceMesh("cuda", [0], mesh_dim_names=("dp_shard",))
        for module in model.modules():
            for name, one in list(module.named_parameters(recurse=False)):
                spec = DTensorSpec(mesh, (Shard(0),), TensorMeta(one.shape, one.stride(), one.dtype))
                setattr(module, name, nn.Parameter(DTensor(one.detach(), spec, requires_grad=False)))
        read_shards(model.causal_lm, files, CPU)
        assert {one.to_local().device.type for one in model.parameters()} == {"cpu"}
    finally:
        dist.destroy_process_group()
