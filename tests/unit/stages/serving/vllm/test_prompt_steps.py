"""vLLM on a CPU is started so that it reads prompts whole, and with recurrent states so that it starts at all."""

import json
import subprocess
from pathlib import Path

import pytest
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
)

from stages.core.errors import RecipeError
from stages.models.facts import ModelFacts
from stages.serving.backend import EngineAddress
from stages.serving.config import ServingConfig
from stages.serving.engine import LaunchSpec
from stages.serving.registry import ENGINES
from stages.serving.vllm.engine import find_vllm
from stages.serving.vllm.prompt_steps import whole_prompts
from tests.zoo.models import FAMILIES, tiny_config

WHOLE, WITHOUT_PREFIXES = "--no-enable-chunked-prefill", "--no-enable-prefix-caching"
RECURRENT = {
    *("bamba", "falcon_h1", "granitemoehybrid", "jamba", "kimi_linear", "lfm2", "lfm2_moe", "lfm2_vl", "mamba"),
    *("mamba2", "minimax", "nemotron_h", "olmo_hybrid", "qwen3_5", "qwen3_5_moe_text", "qwen3_5_text", "qwen3_next"),
    *("recurrent_gemma", "zamba2"),
}
"""Families with recurrent states: of all that vLLM knows as such, see below, and of some that it does not serve."""
HYBRIDS = """
import json, sys
from vllm.model_executor.models.interfaces import is_hybrid
from vllm.model_executor.models.registry import ModelRegistry
known = {one: ModelRegistry.models[name] for one, name in json.load(sys.stdin).items() if name in ModelRegistry.models}
print(json.dumps([family for family, model in known.items() if is_hybrid(model.load_model_cls())]))
"""


def options(family: str, **arguments: object) -> list[str]:
    return whole_prompts(ModelFacts(tiny_config(family).to_dict()), ServingConfig(arguments=arguments))


def test_prompts_are_read_whole_and_prefixes_of_recurrent_models_are_not_kept() -> None:
    found = {family: options(family) for family in FAMILIES}
    assert {family for family, made in found.items() if made == [WHOLE, WITHOUT_PREFIXES]} == RECURRENT
    assert all(made == [WHOLE] for family, made in found.items() if family not in RECURRENT)
    # A class of vLLM that inherits from another's, around the config of a language model.
    unknown = {"architectures": ["InternS2PreviewForConditionalGeneration"], "text_config": {"linear_num_key_heads": 2}}
    assert whole_prompts(ModelFacts(unknown), ServingConfig()) == [WHOLE, WITHOUT_PREFIXES]
    attends = {"layer_types": ["attention"], "mamba_d_state": 16}
    assert whole_prompts(ModelFacts(attends), ServingConfig()) == [WHOLE], "Granite 4's smallest has no such layer"


@pytest.mark.nightly
def test_the_families_are_those_that_vllm_knows_as_hybrids() -> None:
    names = MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES | MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    asked = {family: names[family] for family in FAMILIES if family in names}
    ran = subprocess.run(
        [find_vllm().python, "-c", HYBRIDS], input=json.dumps(asked), capture_output=True, text=True, check=True
    )
    hybrids = set(json.loads(ran.stdout.splitlines()[-1]))
    assert hybrids and hybrids <= RECURRENT


@pytest.mark.parametrize("on_cpu", [True, False])
def test_in_an_image_too(on_cpu: bool, tmp_path: Path) -> None:
    tiny_config("gpt_neox").save_pretrained(tmp_path)
    spec = LaunchSpec(model=tmp_path, served_name="m", serving=ServingConfig(), engine_version="image")
    command = ENGINES["vllm"].program_in_image(on_cpu=on_cpu).server_command(spec, EngineAddress(Path("engine.sock")))
    assert (WHOLE in command) == on_cpu


def test_arguments_with_which_it_would_not_start_are_refused() -> None:
    with pytest.raises(RecipeError, match=r"max-num-batched-tokens: found 63, but prompts may have 64 tokens"):
        options("llama", **{"max-num-batched-tokens": 63})
    assert options("llama", **{"max-num-batched-tokens": 64}) == [WHOLE]
    with pytest.raises(RecipeError, match=r"enable-prefix-caching: the model has recurrent states"):
        options("qwen3_next", **{"enable-prefix-caching": True})
    assert options("llama", **{"enable-prefix-caching": True}) == [WHOLE]
    in_steps = {"max-num-batched-tokens": 63, "enable-prefix-caching": True, "enable-chunked-prefill": True}
    assert options("qwen3_next", **in_steps) == []
