"""Options by which vLLM on a CPU reads each prompt in one step.

vLLM 0.32 ends on a CPU at a request with a seed whose prompt it reads in several ("CPU Generator does not use offset"),
which happens as soon as more tokens of prompts wait than one step takes.
"""

import re
from functools import cache
from pathlib import Path

from stages.models.facts import ModelFacts

HYBRID = "IsHybrid"
"""Class of vLLM from which its models with recurrent states inherit."""


def whole_prompts(model: ModelFacts, python: Path) -> list[str]:
    """Return vLLM's options for reading prompts whole; none for a model that it has no class for.

    python: of vLLM's environment. With recurrent states it has a cache of prefixes only for prompts read in steps.
    """
    for folder in python.parent.parent.glob("lib/python3*/site-packages/vllm/model_executor/models"):
        sources = [_source(str(name), folder) for name in model.config.get("architectures") or ()]
        if sources and all(sources):
            is_hybrid = any(HYBRID in one for one in sources)
            return ["--no-enable-chunked-prefill", *["--no-enable-prefix-caching"] * is_hybrid]
    return []


@cache
def _source(architecture: str, folder: Path) -> str:
    """Return the source of vLLM's module for an architecture, as an import takes seconds; "" for none."""
    listed = (folder / "registry.py").read_text("utf-8")
    module = re.search(rf'"{re.escape(architecture)}": \(\s*"(\w+)"', listed)
    return (folder / f"{module[1]}.py").read_text("utf-8") if module else ""
