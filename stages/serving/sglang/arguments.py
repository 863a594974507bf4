"""Options of `sglang serve` that a recipe passes through: of its 532, those that tune."""

from __future__ import annotations

from pathlib import Path

from stages.serving.passed_options import PassedOptions

CHECK = Path(__file__).with_name("option_check.py")
PASSED = PassedOptions(
    "SGLang",
    (
        *("attention-backend", "sampling-backend", "grammar-backend", "quantization", "kv-cache-dtype", "page-size"),
        *("mem-fraction-static", "max-total-tokens", "max-prefill-tokens", "chunked-prefill-size"),
        *("enable-mixed-chunk", "schedule-policy", "schedule-conservativeness", "num-continuous-decode-steps"),
        *("disable-overlap-schedule", "disable-radix-cache", "radix-eviction-policy", "enable-deterministic-inference"),
        *("enable-fp32-lm-head", "cuda-graph-max-bs-decode", "cuda-graph-max-bs-prefill", "enable-torch-compile"),
        *("disable-custom-all-reduce", "dp-size", "ep-size", "pp-size", "random-seed", "watchdog-timeout"),
        *("reasoning-parser", "tool-call-parser", "speculative-algorithm", "speculative-num-steps"),
        *("speculative-eagle-topk", "speculative-num-draft-tokens", "speculative-ngram-max-trie-depth"),
        "speculative-ngram-capacity",
    ),
)
"""As SGLang 0.5.23 has them."""
