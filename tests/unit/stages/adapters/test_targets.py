"""Layers chosen for an adapter are the same as PEFT's, whether chosen from a model, its files or its sizes."""

import ast
import re
from pathlib import Path

import peft
import pytest
import torch
from peft.tuners.lora.layer import ParamWrapper
from peft.utils.transformers_weight_conversion import _MODEL_TO_CONVERSION_PATTERN, _MOE_TARGET_MODULE_MAPPING
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.pytorch_utils import Conv1D

from stages.adapters.config import AdapterConfig
from stages.adapters.lora import adapted_layers, add_adapter
from stages.adapters.targets import former_names
from stages.models.adapter_targets import FORMER_NAMES, AdapterTargets
from stages.models.facts import ModelFacts
from stages.models.linear_layers import linear_layers, stacked_parameters

ROOT = Path(__file__).parents[4]
RANK = 2
ROTARY = {
    "num_hidden_layers": 3, "hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2,
    "num_key_value_heads": 2, "vocab_size": 40, "head_dim": 8, "pad_token_id": None,
}  # fmt: skip
EXPERTS = {"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 12}
FAMILIES = {
    "llama": ROTARY,
    "mistral": ROTARY,
    "qwen2": ROTARY,
    "qwen3": ROTARY,
    "gpt2": {"n_layer": 3, "n_embd": 16, "n_head": 2, "vocab_size": 40, "n_positions": 32},
    "opt": {"num_hidden_layers": 3, "hidden_size": 16, "ffn_dim": 24, "num_attention_heads": 2, "vocab_size": 40,
            "word_embed_proj_dim": 16},
    "bloom": {"n_layer": 3, "hidden_size": 16, "n_head": 2, "vocab_size": 40},
    "mpt": {"n_layers": 3, "d_model": 16, "n_heads": 2, "vocab_size": 40, "expansion_ratio": 4},
    "mixtral": {**ROTARY, **EXPERTS},
    "qwen3_moe": {**ROTARY, **EXPERTS, "mlp_only_layers": [0]},
    "olmoe": {**ROTARY, **EXPERTS},
    "gpt_oss": {**ROTARY, **EXPERTS},
}  # fmt: skip
WITHOUT_SHAPE = ("olmoe", "gpt_oss")


def make_model(family):
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **FAMILIES[family]))
    model.to_empty(device="cpu")
    model.tie_weights()
    return model


def names_of(model):
    """Return the names of a model's linear layers, except the output head, and of all its parameters."""
    head = model.get_output_embeddings()
    linear = [
        name for name, one in model.named_modules() if isinstance(one, torch.nn.Linear | Conv1D) and one is not head
    ]
    return linear, [name for name, _ in model.named_parameters()]


def names_of_shape(family):
    shape = ModelFacts(AutoConfig.for_model(family, **FAMILIES[family]).to_dict()).shape
    layers = range(shape.num_layers)
    linear = [one.name for layer in layers for one in linear_layers(shape, layer)]
    return linear, [one.name for layer in layers for one in stacked_parameters(shape, layer)]


def chosen(fields, linear, parameters, former):
    """Return the LoRA rank of each layer and parameter that a recipe's adapter fields choose, by name."""
    targets = AdapterTargets(AdapterConfig(rank=RANK, **fields), former)
    ranks = {name: RANK for name in linear if targets.has_layer(name)}
    return ranks | {name: RANK * times for name in parameters if (times := targets.ranks_of(name))}


def adapted(model):
    """Return the LoRA rank of all adapted layers and parameters in a model with a PEFT adapter, by full name."""
    found = {}
    for name, layer in adapted_layers(model).items():
        if isinstance(layer, ParamWrapper):
            name = f"{name.replace('.base_layer', '')}.{layer.parameter_name}"
        found[name.removeprefix("base_model.model.")] = layer.r["default"]
    return found


def peft_alone(family, fields):
    lists = {name: list(value) if isinstance(value, tuple) else value for name, value in fields.items()}
    return adapted(peft.get_peft_model(make_model(family), peft.LoraConfig(r=RANK, **lists)))


def cases(family):
    """Yield adapter configs for a model architecture that PEFT's own options can express."""
    former = former_names(make_model(family))
    ends = sorted({name.rpartition(".")[2] for name in names_of(make_model(family))[0]} - former.keys())
    yield {}
    yield {"target_modules": tuple(ends[:2])}
    yield {"target_modules": (ends[0],), "layers_to_transform": (0, 2)}
    yield {"target_modules": tuple(ends), "exclude_modules": (ends[-1],)}
    yield {"target_modules": tuple(ends), "modules_to_save": (ends[0],)}
    if not former:
        yield {"target_modules": rf".*\.[02]\..*{re.escape(ends[0])}"}
        yield {"target_modules": rf".*\.({'|'.join(ends)})", "exclude_modules": (ends[0],)}
    if former:
        yield {"target_modules": tuple(former)}
        yield {"target_modules": ("gate", "q_proj")}
        yield {"target_modules": ("q_proj",), "target_parameters": ("mlp.experts.down_proj",)}
        yield {"target_modules": ("q_proj", *former), "modules_to_save": ("q_proj", "down_proj")}
    if family == "gpt_oss":
        yield {"target_modules": ("q_proj",), "target_parameters": ("experts.gate_up_proj", "experts.down_proj")}


PEFT_CASES = [pytest.param(family, fields, id=f"{family}-{fields}") for family in FAMILIES for fields in cases(family)]


@pytest.mark.parametrize(("family", "fields"), PEFT_CASES)
def test_the_choice_is_that_of_peft_alone(family, fields):
    model = make_model(family)
    expected = peft_alone(family, {"target_modules": "all-linear", **fields})
    assert expected
    assert chosen(fields, *names_of(model), former_names(model)) == expected
    if family not in WITHOUT_SHAPE:
        assert chosen(fields, *names_of_shape(family), FORMER_NAMES.get(family, {})) == expected


@pytest.mark.parametrize(
    ("family", "fields"),
    [
        ("llama", {"layers_to_transform": (1,), "exclude_modules": ("q_proj",)}),
        ("gpt2", {"target_modules": r".*\.c_attn", "layers_to_transform": (1,)}),
        ("qwen3_moe", {"layers_to_transform": (0, 2)}),
        ("qwen3_moe", {"target_modules": ("down_proj", "q_proj"), "layers_to_transform": (0, 2)}),
        ("qwen3_moe", {"exclude_modules": ("experts",)}),
        ("qwen3_moe", {"modules_to_save": ("mlp.gate",)}),
        ("mixtral", {"modules_to_save": ("mlp",)}),
        ("mixtral", {"modules_to_save": ("experts",)}),
        ("qwen3_moe", {"exclude_modules": ("down_proj", "gate")}),
        ("qwen3_moe", {"target_modules": r".*\.[12]\.mlp\.experts\..*|.*\.2\.self_attn\.q_proj"}),
        ("mixtral", {"target_modules": r".*\.1\.mlp\.(gate|experts\.(w1|w2|w3))"}),
        ("olmoe", {"layers_to_transform": (1,), "exclude_modules": ("gate",)}),
    ],
    ids=str,
)
def test_what_peft_has_no_words_for_is_put_there_as_chosen(family, fields):
    """PEFT gets full layer names where its own options cannot express our choice of adapted layers."""
    model = make_model(family)
    expected = chosen(fields, *names_of(model), former_names(model))
    if family not in WITHOUT_SHAPE:
        assert chosen(fields, *names_of_shape(family), FORMER_NAMES.get(family, {})) == expected
    add_adapter(model, AdapterConfig(rank=RANK, **fields), seed=0)
    assert adapted(model) == expected


@pytest.mark.parametrize("family", FORMER_NAMES)
def test_former_names_of_known_shapes_are_those_of_peft(family):
    assert FORMER_NAMES[family] == _MOE_TARGET_MODULE_MAPPING[_MODEL_TO_CONVERSION_PATTERN[family]]


def test_the_choice_is_defined_once():
    """The fields that name adapted layers are interpreted in one module; others pass them to PEFT or name them."""
    fields = {"target_modules", "target_parameters", "exclude_modules", "layers_to_transform"}
    readers = {
        str(file.relative_to(ROOT))
        for room in ("flows", "stages")
        for file in (ROOT / room).rglob("*.py")
        if any(name in (text := file.read_text()) for name in fields)
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Attribute) and node.attr in fields
    }
    assert readers == {
        "stages/models/adapter_targets.py",
        "stages/adapters/config.py",  # refuses what no model could have
        "stages/adapters/lora.py",  # writes PEFT's config
        "stages/adapters/named_layers.py",  # names what the files' headers lack
        "stages/adapters/targets.py",  # translates for PEFT, and names what the model lacks
    }
