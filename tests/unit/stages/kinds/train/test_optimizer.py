"""Optimizers that conflict with other config fields are refused. Naming the default optimizer changes no version."""

import pytest
import torch
from pydantic import ValidationError
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from stages.kinds.train.blocks import OptimizerConfig
from stages.models.known_models import KNOWN
from stages.parallel.processes import joined_processes
from stages.planner.costs import StepCase
from stages.planner.engines.registry import COSTS
from stages.planner.memory import GIB, memory
from stages.planner.partition import pipeline_stages
from tests.train_stage import make_config

MUON = {"name": "muon"}
IN_BF16 = {"bf16_stochastic_round": True}


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"engine": "megatron"}, "`optimizer.name: muon` needs `engine: fsdp`, found megatron"),
        ({"adapter": {}}, "`optimizer.name: muon` .* `adapter`, whose factors are no whole matrices"),
        (
            {"layout": {"cpu_offload": True}},
            "`layout.cpu_offload` .* gathers matrices on the device; set `cpu_offload: f",
        ),
    ],
    ids=["engine", "adapter", "offload"],
)
def test_what_does_not_go_with_muon_is_refused(fields, said):
    with pytest.raises(ValidationError, match=said):
        make_config(optimizer=MUON, **fields)


@pytest.mark.parametrize(
    ("optimizer", "fields", "said"),
    [
        ({"exp_avg_dtype": "bf16"}, {"engine": "megatron"}, "`optimizer.exp_avg_dtype` needs `engine: fsdp`"),
        (
            IN_BF16,
            {"precision": "fp32"},
            "`optimizer.bf16_stochastic_round` does not go with `precision: fp32`, since it",
        ),
        (IN_BF16, {"adapter": {}}, "does not go with `adapter`, which learns in fp32"),
        (
            IN_BF16,
            {"layout": {"accumulate": "sharded"}},
            '`layout.accumulate: sharded` .* in bf16; set `accumulate: "auto"`',
        ),
    ],
    ids=["engine", "precision", "adapter", "accumulate"],
)
def test_what_does_not_go_with_fewer_bits_is_refused(optimizer, fields, said):
    with pytest.raises(ValidationError, match=said):
        make_config(optimizer=optimizer, **{"precision": "bf16", **fields})


def test_fewer_bits_are_predicted_to_need_less():
    """Low-precision AdamW is predicted to need 8 bytes a parameter with gradients and moments, instead of 16."""
    shape = KNOWN["llama3 8b"]
    layout = {"dp_shard": 8, "micro_batch_size": 1}
    options = {"layout": layout, "global_batch_size": 8, "execution": {"processes": 8}, "precision": "bf16"}
    fewer = {"exp_avg_dtype": "bf16", "exp_avg_sq_dtype": "bf16", **IN_BF16}
    for optimizer, size in (({}, 16), ({"exp_avg_dtype": "bf16"}, 14), (fewer, 8)):
        config = make_config(optimizer=optimizer, **options)
        case = StepCase(shape, COSTS["fsdp"], config.layout, config.workload, COSTS["fsdp"].program(config.layout))
        held = COSTS["fsdp"].model_states(case, *pipeline_stages(shape.num_layers, 1))
        assert sum(held) == pytest.approx(size * shape.num_parameters / 8, rel=1e-3)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"optimizer": {"name": "adamw_8bit"}}, "found adamw_8bit: its moments need torchao or bitsandbytes"),
        ({"optimizer": {"name": "adafactor"}}, "found adafactor: .* expected adamw or muon"),
        ({"precision": "fp16"}, "found fp16, in which small gradients become 0 unless the loss is scaled"),
    ],
)
def test_what_cannot_be_had_is_refused_with_the_reason(fields, said):
    with pytest.raises(ValidationError, match=said):
        make_config(**fields)


def test_the_default_is_no_part_of_the_identity_and_muon_is():
    assert "optimizer" not in make_config().identity()
    assert make_config(optimizer={"name": "adamw"}).identity() == make_config().identity()
    assert make_config(optimizer=MUON).identity()["optimizer"]["name"] == "muon"
    assert make_config(optimizer=MUON).resume_identity() != make_config().resume_identity()


def test_fields_of_muon_have_no_effect_on_adamw():
    of_muon = {field for field, _ in OptimizerConfig().idle_fields()}
    of_adamw = {field for field, _ in OptimizerConfig(name="muon").idle_fields()}
    assert of_muon | of_adamw == OptimizerConfig.model_fields.keys() - {"name"}
    assert not of_muon & of_adamw


def test_adafactor_of_torch_still_fails_on_shards():
    """torch.optim.Adafactor fails on sharded tensors, so we refuse it; once it works, see `UNSUPPORTED`."""
    with joined_processes():
        mesh = init_device_mesh("cpu", (1,))
        weight = torch.nn.Parameter(distribute_tensor(torch.ones(4, 4), mesh, [Shard(0)]))
        weight.grad = distribute_tensor(torch.ones(4, 4), mesh, [Shard(0)])
        with pytest.raises(RuntimeError, match="in-place operations that require placement changes"):
            torch.optim.Adafactor([weight]).step()


def test_muon_is_predicted_to_keep_one_moment_of_matrices():
    shape = KNOWN["llama3 8b"]
    layout = {"dp_shard": 8, "micro_batch_size": 1}
    predicted = {
        name: memory(
            shape,
            "fsdp",
            config.layout,
            config.workload,
        ).worst.optimizer
        for name in ("adamw", "muon")
        for config in [
            make_config(optimizer={"name": name}, layout=layout, global_batch_size=8, execution={"processes": 8})
        ]
    }
    matrices = shape.num_layers * (shape.attention_matrix_parameters + shape.ffn_parameters)
    assert (predicted["adamw"] - predicted["muon"]) * GIB == pytest.approx(4 * matrices / 8, rel=1e-3)
