"""BFCL's categories: those that are run, and why others are refused."""

import difflib
from collections.abc import Mapping
from types import MappingProxyType

METRIC = "accuracy"
CATEGORIES = (
    *("simple_python", "simple_java", "simple_javascript", "multiple", "parallel", "parallel_multiple", "irrelevance"),
    *("live_simple", "live_multiple", "live_parallel", "live_parallel_multiple", "live_irrelevance", "live_relevance"),
    *("multi_turn_base", "multi_turn_miss_func", "multi_turn_miss_param", "multi_turn_long_context"),
)
"""BFCL's categories that need nothing from outside, whose questions come with the package."""
_SEARCH = "its tools search the web, by a service with a key"
_MEMORY = "its conversations are kept in files that later questions read, some by an embedding model from a hub"
REFUSED: Mapping[str, str] = MappingProxyType(
    {
        **dict.fromkeys(("web_search", "web_search_base", "web_search_no_snippet"), _SEARCH),
        **dict.fromkeys(("memory", "memory_kv", "memory_vector", "memory_rec_sum"), _MEMORY),
        "agentic": "its categories search the web, or keep files",
        "format_sensitivity": "it compares formats of prompts, and is no score of its own",
    }
)
"""Reason for each category of BFCL that is not run here."""
NUM_NAMED = 4


def problem_of(task: str) -> str | None:
    """Return why a category cannot be run, and what to take instead; None for one that can."""
    if task in CATEGORIES:
        return None
    if why := REFUSED.get(task):
        return f"BFCL's {task} is not run here: {why}; take {', '.join(CATEGORIES[:NUM_NAMED])} or another"
    close = [one for one in CATEGORIES if one.startswith(f"{task}_")]
    close = close or difflib.get_close_matches(task, [*CATEGORIES, *REFUSED], n=NUM_NAMED, cutoff=0.5)
    meant = f"did you mean {' or '.join(close)}?" if close else f"expected one of {', '.join(CATEGORIES)}"
    return f"BFCL has no category {task!r}; {meant}"
