"""First events of the ledgers of invented refreshes."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from flows.ledger.events import PlannedEntry, RefreshBegan
from flows.ledger.process_identity import ProcessIdentity


def beginning(
    folder: Path, kinds: Mapping[str, str], refresh: str = "nightly-1", recipe: str = "nightly", **fields: Any
) -> RefreshBegan:
    """Return the event that begins a refresh of this process. kinds: of its stages, by name. fields: other fields."""
    stages = {name: PlannedEntry(kind=kind, version="0123456789ab") for name, kind in kinds.items()}
    settled = {"recipe_path": folder / "recipe.yaml", "process": ProcessIdentity.own(), "stages": stages}
    settled |= {"hardware": "1 × abacus", "git_commit": None}
    return RefreshBegan(refresh=refresh, recipe=recipe, **{**settled, **fields})
