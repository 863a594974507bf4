"""Options by which vLLM on a CPU reads each prompt in one step.

vLLM 0.32 ends on a CPU at a request with a seed whose prompt it reads in several ("CPU Generator does not use offset"),
which happens as soon as more tokens of prompts wait than one step takes.
"""

import re
from collections.abc import Mapping
from typing import Any

from stages.core.errors import RecipeError
from stages.models.facts import ModelFacts
from stages.serving.config import ServingConfig, max_tokens_of

IN_STEPS, PREFIXES, STEP = "enable-chunked-prefill", "enable-prefix-caching", "max-num-batched-tokens"
TEXT_PARTS = ("text_config", "llm_config", "language_config", "thinker_config")
"""Fields of a model's config that hold the config of its language model."""
RECURRENT = re.compile(r"mamba|ssm|linear|conv|recurrent|delta|kda|layer_group_size")
"""Pattern in the kinds of layers, else in the fields, of configs of models with recurrent states."""


def whole_prompts(facts: ModelFacts, serving: ServingConfig) -> list[str]:
    """Return vLLM's options for reading prompts whole; none where the recipe asks for `enable-chunked-prefill`.

    With recurrent states it keeps prefixes only of prompts that it reads in steps. Raises RecipeError for arguments in
    the recipe with which vLLM would not start.
    """
    asked = serving.arguments
    if asked.get(IN_STEPS) is True:
        return []
    why = f"on a CPU vLLM reads them in one step, since a request with a seed would end it; or say `{IN_STEPS}: true`"
    step, longest = asked.get(STEP), serving.max_model_len or max_tokens_of(facts.fields)
    if isinstance(step, int) and longest and step < longest:
        raise RecipeError(
            f"serving.arguments.{STEP}: found {step}, but prompts may have {longest} tokens, and {why}; raise it, or "
            "lower serving.max_model_len"
        )
    if not _is_recurrent(facts.config):
        return ["--no-enable-chunked-prefill"]
    if asked.get(PREFIXES) is True:
        raise RecipeError(
            f"serving.arguments.{PREFIXES}: the model has recurrent states, whose prefixes vLLM keeps only of prompts "
            f"that it reads in several steps, but {why}; remove it"
        )
    return ["--no-enable-chunked-prefill", "--no-enable-prefix-caching"]


def _is_recurrent(config: Mapping[str, Any]) -> bool:
    """Return whether a config is of a model with recurrent states; in doubt, as it then serves without prefixes."""
    kinds = config.get("layer_types") or config.get("layers_block_type")
    named = kinds if isinstance(kinds, list) else [name for name, value in config.items() if value]
    parts = [config[name] for name in TEXT_PARTS if isinstance(config.get(name), Mapping)]
    return any(RECURRENT.search(str(name)) for name in named) or any(map(_is_recurrent, parts))
