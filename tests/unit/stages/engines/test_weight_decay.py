"""Weight decay applies to the parameters that Transformers' Trainer chooses, or to all if the recipe says so."""

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, GPT2Config, PreTrainedConfig, Qwen2Config, Qwen3Config, Trainer

from stages.engines.fsdp.engine import FsdpEngine
from stages.engines.fsdp.optimizer import decayed_parameters, parameter_groups
from stages.models.facts import ModelFacts
from stages.parallel.processes import joined_processes
from tests.train_stage import make_config

SIZES = {
    "vocab_size": 32,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
}
CONFIGS: dict[str, PreTrainedConfig] = {
    "biases": Qwen2Config(**SIZES),
    "norms of queries": Qwen3Config(**SIZES, head_dim=8),
    "layer norms named ln": GPT2Config(vocab_size=32, n_embd=16, n_layer=1, n_head=2),
}


def build(name: str) -> torch.nn.Module:
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(CONFIGS[name])


@pytest.mark.parametrize("name", CONFIGS)
def test_the_default_is_what_the_trainer_of_transformers_chooses(name: str) -> None:
    model = build(name)
    assert decayed_parameters(model) == set(Trainer.get_decay_parameter_names(None, model))


@pytest.mark.parametrize("everything", [False, True])
def test_the_recipe_decides_what_an_engine_shrinks(tmp_path: Path, everything: bool) -> None:
    model = build("biases")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1.0)
    model.save_pretrained(tmp_path / "model")
    config = make_config(weight_decay=0.5, learning_rate=1e-1, precision="fp32", decay_norms_and_biases=everything)
    with joined_processes() as device:
        engine = FsdpEngine(ModelFacts(tmp_path / "model"), config.engine_settings, device)
        for parameter in engine._parameters:
            parameter.grad = torch.zeros_like(parameter)
        engine._update(config.learning_rate, 0.0, None)
        engine.export(tmp_path / "shrunk", torch.float32)
    shrunk = AutoModelForCausalLM.from_pretrained(tmp_path / "shrunk", dtype=torch.float32).state_dict()
    for name, weight in model.state_dict().items():
        decays = everything or not ("norm" in name or "bias" in name)
        torch.testing.assert_close(shrunk[name], weight * 0.95 if decays else weight, msg=name)


def test_a_model_of_matrices_alone_has_one_group() -> None:
    linear = torch.nn.Sequential(torch.nn.Linear(2, 2, bias=False))
    assert len(parameter_groups(linear, 0.1, decayed_parameters(linear))) == 1


def test_what_decays_is_part_of_the_identity_where_anything_does() -> None:
    assert "decay_norms_and_biases" not in make_config().identity()
    assert make_config(weight_decay=0.1).identity()["decay_norms_and_biases"] is False
