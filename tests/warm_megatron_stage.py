"""Program that runs a Megatron train stage in forked processes, with the imports made in their parent."""

from importlib import import_module

from stages.engines.megatron.compat import prepare_megatron
from tests.warm_stage import main

__all__ = ["main"]

prepare_megatron()
import_module("stages.engines.megatron.engine")
