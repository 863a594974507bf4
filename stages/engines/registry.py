"""Registry of the training engines, with the function that builds each.

A new engine is a folder beside this file and a line here; what it supports is in `stages.parallel.engines`, what it
costs in `stages.planner.engines`. Its own imports take seconds, and are made when it is built.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from stages.core.contract import is_main_process
from stages.engines.settings import EngineSettings
from stages.models.facts import ModelFacts
from stages.parallel.layout import EngineName

if TYPE_CHECKING:
    import torch

    from stages.data.batch import Batch
    from stages.engines.engine import Engine


@dataclass(frozen=True)
class EngineInputs:
    """Arguments from which a training engine is built; the process group exists already."""

    model: ModelFacts
    settings: EngineSettings
    device: torch.device
    start: Path | None
    """Folder of an adapter that training continues; None to start with a new adapter."""
    first_batches: Callable[[int], Sequence[Batch]]
    """Function of the first batches of training rows for EVA, each with that many learned tokens or more."""
    scratch: Path
    """Folder for the training stage's temporary files; a retry that resumes training uses the same folder."""
    report: Callable[[str], None]
    """Function that shows the user a note on the built engine, such as which layers multiply in 8 bits."""


def _build_fsdp(inputs: EngineInputs) -> Engine:
    from stages.engines.fsdp.engine import FsdpEngine

    rows, start, adapter = None, inputs.start, inputs.settings.adapter
    if adapter and adapter.init == "eva":
        from stages.engines.fsdp.eva import InputRows

        rows, start = InputRows(inputs.first_batches(adapter.highest_rank), inputs.scratch / "eva.safetensors"), None
    engine = FsdpEngine(inputs.model, inputs.settings, inputs.device, start, rows)
    if is_main_process():
        slower = None if engine.verdict.packs else engine.verdict.sentence
        for note in (rows.described() if rows else None, slower, engine.note):
            if note:
                inputs.report(note)
    return engine


def _build_megatron(inputs: EngineInputs) -> Engine:
    from stages.engines.megatron.compat import prepare_megatron

    prepare_megatron()
    from stages.engines.megatron.engine import MegatronEngine

    return MegatronEngine(inputs.model, inputs.settings, inputs.device, inputs.start)


BUILDERS: dict[EngineName, Callable[[EngineInputs], Engine]] = {"fsdp": _build_fsdp, "megatron": _build_megatron}
