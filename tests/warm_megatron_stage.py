"""The same with the imports of Megatron, which changes the process that it is in."""

from importlib import import_module

from stages.engines.megatron.compat import prepare_megatron
from tests.warm_stage import main

__all__ = ["main"]

prepare_megatron()
import_module("stages.engines.megatron.engine")
