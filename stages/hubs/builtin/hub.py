"""Hub of models and datasets that the project makes itself (`builtin/`), without a network."""

from __future__ import annotations

import importlib
import json
from pathlib import Path

from stages.core.contract import StageContext
from stages.hubs.builtin.catalog import BUILTINS
from stages.hubs.hub import Request, Source


class Builtins:
    """Hub that runs the makers of the catalog; a revision is a maker's version."""

    def resolve_revision(self, request: Request) -> str:
        return str(BUILTINS[request.source.name].version)

    def deliver(self, request: Request, revision: str, folder: Path, context: StageContext) -> None:
        folder.mkdir()
        builtin = BUILTINS[request.source.name]
        if builtin.product == "model":
            from stages.models.start_up import hide_unused_packages  # and Transformers, in a second

            hide_unused_packages()
        importlib.import_module(builtin.module).make(folder)

    def read_file(self, source: Source, revision: str, name: str) -> str | None:
        sizes = BUILTINS[source.name].sizes
        return json.dumps(sizes) if sizes and name == "config.json" else None


HUB = Builtins()
