"""Families whose code does not allow a split that their sizes do: what training finds at its start, known to plans.

Training measures it for any model (`stages/engines/fsdp`); `tests/zoo/test_known_splits.py` fails for a name that it
would not refuse.
"""

IN_ROWS = frozenset(
    ("nemotron", "stablelm", "gpt_neo", "gptj", "codegen", "bloom", "falcon", "mpt", "llama4", "llama4_text")
)
"""Families whose documents are not packed, but train as rows of their own."""
WITH_STATES_BESIDE = frozenset(("falcon_h1",))
"""Families with layers that have attention and, beside it, a state along the tokens."""
WRONG_PLANS = frozenset(("apertus", "gemma3n_text", "gemma4", "gemma4_text", "llama4", "llama4_text", "qwen3_vl_moe"))
"""Families whose plan of tensor parallelism in Transformers fails, or computes something else than the whole model."""
