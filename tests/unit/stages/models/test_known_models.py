"""Published models that are known by name have as many parameters as was published, and as Transformers builds."""

import pytest
import torch
import transformers
from transformers.initialization import no_init_weights

from stages.models.known_configs import CONFIGS, known_config
from stages.models.known_models import PUBLISHED, known_model
from stages.models.known_vision import SEEING


@pytest.mark.parametrize("name", PUBLISHED)
def test_parameters_are_those_published(name: str) -> None:
    published = PUBLISHED[name]
    assert published.source
    assert published.shape.num_parameters == pytest.approx(published.parameters, rel=0.005)


@pytest.mark.parametrize("name", CONFIGS)
def test_parameters_of_models_with_configs_are_those_published(name: str) -> None:
    published = CONFIGS[name]
    config = transformers.AutoConfig.for_model(**published.config)
    classes = transformers.AutoModelForImageTextToText if name in SEEING else transformers.AutoModelForCausalLM
    with torch.device("meta"), no_init_weights():
        model = classes.from_config(config)
        model.tie_weights()
    num_parameters = sum(weight.numel() for weight in model.parameters())
    assert published.source
    assert num_parameters == pytest.approx(published.parameters, rel=0.005)


@pytest.mark.parametrize(
    ("config", "name"),
    [
        ("CohereConfig", "command r v01"),
        ("DeepseekV3Config", "deepseekv3"),
        ("GemmaConfig", "gemma 7b"),
        ("Gemma2Config", "gemma2 2b"),
        ("GptOssConfig", "gpt oss 120b"),
        ("MiniMaxM2Config", "minimax m2"),
        ("SmolLM3Config", "smollm3 3b"),
    ],
)
def test_parameters_are_those_of_transformers_defaults(config: str, name: str) -> None:
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(getattr(transformers, config)())
    num_parameters = sum(weight.numel() for weight in model.parameters())
    assert PUBLISHED[name].shape.num_parameters == pytest.approx(num_parameters, rel=0.001)


@pytest.mark.parametrize(
    ("written", "name"),
    [
        ("google/gemma-2-9b-it", "gemma2 9b"),
        ("google/gemma-7b", "gemma 7b"),
        ("unsloth/gemma-3-27b-it", "gemma3 27b"),
        ("ibm-granite/granite-3.3-8b-instruct", "granite3 8b"),
        ("meta-llama/Llama-3.2-3B", "llama3.2 3b"),
        ("mistralai/Mistral-Small-24B-Base-2501", "mistral small 24b"),
        ("MiniMaxAI/MiniMax-M2", "minimax m2"),
        ("HuggingFaceTB/SmolLM3-3B", "smollm3 3b"),
        ("allenai/Olmo-3.1-32B-Think", "olmo3 32b"),
        ("CohereForAI/c4ai-command-r-plus-08-2024", "command r plus"),
        ("CohereForAI/c4ai-command-r-08-2024", "command r 08"),
    ],
)
def test_names_are_understood_as_hubs_write_them(written: str, name: str) -> None:
    assert known_model(written) == PUBLISHED[name].shape


@pytest.mark.parametrize("written", ["ibm-granite/granite-8b-code-base", "google/codegemma-2b", "microsoft/phi-4-mini"])
def test_other_models_of_a_family_are_not_taken_for_a_known_one(written: str) -> None:
    assert known_model(written) is None


@pytest.mark.parametrize(
    ("written", "name"),
    [
        ("Qwen/Qwen2.5-VL-7B-Instruct", "qwen2.5 vl 7b"),
        ("hf://Qwen/Qwen3-VL-8B-Instruct", "qwen3 vl 8b"),
        ("google/gemma-3-12b-it", "gemma3 12b"),
        ("Qwen/Qwen3.6-35B-A3B", "qwen3.6 35b"),
        ("google/gemma-4-E2B-it", "gemma4 e2b"),
        ("LiquidAI/LFM2-8B-A1B", "lfm2 8b"),
        ("meta-llama/Llama-4-Maverick-17B-128E-Instruct", "llama4 maverick"),
        ("ibm-granite/granite-4.0-h-tiny", "granite4.0 h tiny"),
        ("nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16", "nemotron3 nano 30b"),
        ("baidu/ERNIE-4.5-21B-A3B-PT", "ernie 4.5 21b"),
        ("LGAI-EXAONE/EXAONE-4.0-32B", "exaone 4.0 32b"),
        ("zai-org/GLM-5", "glm 5"),
        ("moonshotai/Kimi-K2-Instruct", "kimi k2"),
    ],
)
def test_names_of_models_with_configs_are_understood(written: str, name: str) -> None:
    facts = known_config(written)
    assert facts and facts.config == CONFIGS[name].config


@pytest.mark.parametrize("written", ["google/gemma-3-1b-it", "moonshotai/Kimi-K2.5", "baidu/ERNIE-4.5-VL-28B-A3B-PT"])
def test_other_models_are_not_taken_for_one_with_a_config(written: str) -> None:
    assert known_config(written) is None
