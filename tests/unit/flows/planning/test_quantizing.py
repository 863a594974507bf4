"""Quantizations whose group size or parallel degree does not fit the model are refused when a plan is made."""

import json

import pytest

from flows.running.request import RefreshRequest, make_plan
from stages.core.errors import RecipeError

CONFIG = {
    "model_type": "llama",
    "num_hidden_layers": 2,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "vocab_size": 512,
    "max_position_embeddings": 512,
}


@pytest.fixture
def plan(tmp_path, monkeypatch):
    monkeypatch.setenv("LIFECYCLE_HOME", str(tmp_path / "home"))
    model = tmp_path / "model"
    model.mkdir()
    (model / "model.safetensors").touch()

    def run(config=CONFIG, **fields):
        (model / "config.json").write_text(json.dumps(config))
        stages = {
            "base": {"kind": "download", "model": f"file://{model}"},
            "rows": {"kind": "download", "dataset": "builtin/addition"},
            "small": {
                "kind": "quantize",
                "model": "base",
                "method": "gptq",
                "calibration": {"dataset": "rows"},
                **fields,
            },
        }
        path = tmp_path / "recipe.yaml"
        path.write_text(json.dumps({"stages": stages}))
        return make_plan(RefreshRequest(str(path)))

    return run


@pytest.mark.parametrize(
    ("fields", "found"),
    [
        ({"group_size": 7}, r"group_size: 7 is odd"),
        ({"group_size": 2**20}, r"model: .*a rank's input of 256 is no multiple of group_size 1048576[\s\S]*128"),
        ({"group_size": 96}, r"model: .*a rank's input of 256 is no multiple of group_size 96"),
        ({"tensor_parallel_size": 3}, r"model: .*4 query and 4 key heads cannot be divided between 3 ranks"),
        ({"tensor_parallel_size": 4}, r"model: .*a rank's input of 64 is no multiple of group_size 128"),
    ],
)
def test_sizes_that_are_not_divided(plan, fields, found):
    with pytest.raises(RecipeError, match=rf"(?s)stages\.small\.{found}"):
        plan(**fields)


def test_sizes_that_are(plan):
    assert plan(group_size=128)
    assert plan(group_size=96, ignore=["lm_head", r"re:.*_proj$"])


def test_what_the_config_does_not_say_is_left_to_the_headers(plan):
    assert plan(config={"model_type": "new", "num_hidden_layers": 2}, group_size=96)
    mixture = {"model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2}
    assert plan(config={**CONFIG, **mixture}, group_size=96)


def test_what_a_cluster_quantizes_is_left_to_its_devices(plan):
    assert plan(group_size=96, execution={"launcher": "slurm"})
