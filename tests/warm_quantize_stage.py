"""Program that runs a quantize stage in a forked process, with the imports made in its parent."""

import os
from importlib import import_module

from stages.models.start_up import hide_unused_packages
from tests.forked_stages import main

__all__ = ["main"]

os.environ["TQDM_DISABLE"] = "1"  # as the stage does, before tqdm is imported
hide_unused_packages()
for name in ("stages.kinds.quantize.run", "stages.kinds.quantize.llm_compressor", "stages.kinds.quantize.divergence"):
    import_module(name)
