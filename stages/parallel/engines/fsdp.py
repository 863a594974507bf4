"""Rules about what the FSDP2 engine supports: every recipe option and model, with data parallelism only."""

import importlib.util

from stages.parallel.engines.rules import EngineRules

INSTALLATION = "pip install --no-deps -r deploy/requirements/fp8.in"


class FsdpRules(EngineRules):
    """Rules about the FSDP2 engine, which trains Transformers' own model code."""

    name = "fsdp"
    factors = ("dp_replicate", "dp_shard")
    own_fields = ("reshard_after_forward", "cpu_offload", "prefetch_layers", "compile", "accumulate")

    def missing_package(self, precision: str) -> str | None:
        if precision != "fp8" or importlib.util.find_spec("torchao"):
            return None
        return (
            "`precision: fp8` with `engine: fsdp` multiplies by torchao, which is not installed here; install it "
            f"(`{INSTALLATION}`), or say `precision: bf16`"
        )
