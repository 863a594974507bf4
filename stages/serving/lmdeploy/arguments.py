"""Options of `lmdeploy serve api_server` that a recipe passes through: of its some 90, those that tune."""

from __future__ import annotations

from pathlib import Path

from stages.serving.passed_options import PassedOptions

CHECK = Path(__file__).with_name("option_check.py")
PASSED = PassedOptions(
    "LMDeploy",
    (
        *("backend", "model-format", "quant-policy", "cache-max-entry-count", "cache-block-seq-len", "num-gpu-blocks"),
        *("enable-prefix-caching", "max-prefill-token-num", "num-tokens-per-iter", "max-prefill-iters"),
        *("rope-scaling-factor", "communicator", "cp", "ep", "enable-microbatch", "max-concurrent-requests"),
        *("reasoning-parser", "tool-call-parser", "speculative-algorithm", "speculative-num-draft-tokens"),
    ),
)
"""As LMDeploy 0.18.0 has them."""
