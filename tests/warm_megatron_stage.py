"""Megatron train stage to run in forked processes, with its imports made in their parent."""

from importlib import import_module

from stages.engines.megatron.compat import prepare_megatron
from tests.warm_stage import main

__all__ = ["main"]

prepare_megatron()
import_module("stages.engines.megatron.engine")
