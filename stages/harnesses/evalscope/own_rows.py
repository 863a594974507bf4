"""EvalScope's benchmarks for question sets that exact match does not score."""

WITH_OPTIONS = "general_vmcq"
"""EvalScope's benchmark of own rows in which one of several options is right, as MMMU has them."""
OF_OWN_ROWS: dict[str, tuple[str, ...]] = {"general_vqa": ("Rouge",), WITH_OPTIONS: ("acc",)}
"""EvalScope's benchmarks for people's own rows: a question set of this name is scored by these metrics.

Another of the first, BLEU, downloads a tokenizer of NLTK.
"""
