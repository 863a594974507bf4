"""What a machine may lack that products in 8 bits need. Light: a plan asks without torch."""

from __future__ import annotations

import importlib.util

from stages.parallel.layout import EngineName

INSTALLATION = "pip install --no-deps -r deploy/requirements/fp8.in"


def missing_package(engine: EngineName, precision: str) -> str | None:
    """Return which package products in 8 bits need here and how to install it; None where nothing is missing.

    Megatron looks for Transformer Engine itself.
    """
    if precision != "fp8" or engine != "fsdp" or importlib.util.find_spec("torchao"):
        return None
    return (
        "`precision: fp8` with `engine: fsdp` multiplies by torchao, which is not installed here; install it "
        f"(`{INSTALLATION}`), or say `precision: bf16`"
    )
