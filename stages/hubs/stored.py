"""Placeholder hub for sources that are artifacts of the store (`store://`, `adopted:`, `models:/`).

A plan replaces them by the `file://` sources of their folders (`flows/planning/stored.py`); nothing else asks this hub.
"""

from pathlib import Path
from typing import NoReturn

from stages.core.contract import StageContext
from stages.core.errors import DownloadError
from stages.hubs.hub import Request, Source


class Stored:
    """Placeholder hub for sources in the store: a plan replaces them by folders, so every request is refused."""

    def resolve_revision(self, request: Request) -> str:
        _refuse(request.source)

    def deliver(self, request: Request, revision: str, folder: Path, context: StageContext) -> None:
        _refuse(request.source)

    def read_file(self, source: Source, revision: str, name: str) -> str | None:
        _refuse(source)


HUB = Stored()


def _refuse(source: Source) -> NoReturn:
    raise DownloadError(f"{source} means a folder only where a recipe is planned; name the folder, file://PATH")
