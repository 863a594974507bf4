"""Program that runs an FSDP train stage in forked processes, with the imports made in their parent."""

from importlib import import_module
from importlib.util import find_spec

from stages.models.start_up import start_training_quickly
from tests.forked_stages import main

__all__ = ["main"]

start_training_quickly()
for name in (
    "stages.kinds.train.run",
    "stages.engines.fsdp.engine",
    "stages.engines.fsdp.eva",
    "stages.adapters.check",
    "stages.adapters.effect",
    "stages.adapters.lora",
    "torch._dynamo",
    "transformers.models.qwen3.modeling_qwen3",
    *(["matplotlib.figure"] if find_spec("matplotlib") else []),
):
    import_module(name)
