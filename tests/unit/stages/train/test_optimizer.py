"""An optimizer that does not go with the rest of a stage is refused by name, and versions stay where none is chosen."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from stages.models.known_models import KNOWN
from stages.planner.memory import GIB, memory
from stages.train.optimizer import OptimizerConfig
from tests.train_stage import make_config

MUON = {"name": "muon"}


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"engine": "megatron"}, "`optimizer.name: muon` needs `engine: fsdp`, found megatron"),
        ({"adapter": {}}, "remove `adapter`, or say `optimizer.name: adamw`"),
        ({"layout": {"cpu_offload": True}}, "`layout.cpu_offload`"),
    ],
    ids=["engine", "adapter", "offload"],
)
def test_what_does_not_go_with_muon_is_refused(fields, said):
    with pytest.raises(ValidationError, match=said):
        make_config(optimizer=MUON, **fields)


def test_the_default_is_no_part_of_the_identity_and_muon_is():
    assert "optimizer" not in make_config().identity()
    assert make_config(optimizer={"name": "adamw"}).identity() == make_config().identity()
    assert make_config(optimizer=MUON).identity()["optimizer"]["name"] == "muon"
    assert make_config(optimizer=MUON).resume_identity() != make_config().resume_identity()


def test_fields_of_muon_have_no_effect_on_adamw():
    assert {field for field, _ in OptimizerConfig().idle_fields()} == OptimizerConfig.model_fields.keys() - {"name"}
    assert not list(OptimizerConfig(name="muon").idle_fields())


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
