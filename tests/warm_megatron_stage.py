"""Rank program of a train stage with Megatron's imports, which change the process that they are in."""

from importlib import import_module

from stages.engines.megatron.compat import prepare_megatron
from tests.warm_stage import main

__all__ = ["main"]

prepare_megatron()
import_module("stages.engines.megatron.engine")
