"""How much of a refresh MLflow has, and which of its runs is which attempt: `mlflow.json` beside the ledger.

The shipper alone writes it. An attempt's run is looked up here when something is displayed, and recorded nowhere else.
"""

from __future__ import annotations

from pydantic import Field

from flows.ledger.refreshes import Ledger, ledger_of
from stages.core.contract import StrictModel
from stages.core.files import write_atomically

LAYOUTS = "layouts"
"""The runs of a comparison are noted as `layouts/0`, `layouts/1`, …, as if they were attempts."""


class ShippedAttempt(StrictModel):
    """How much of an attempt MLflow has: `next_byte` is where the rest of its `metrics.jsonl` begins."""

    run_id: str
    next_byte: int
    done: bool = False


class Shipped(StrictModel):
    """`mlflow.json`. `done`: MLflow has all of what the ledger was when it had this many bytes."""

    experiment_id: str | None = None
    parent_run_id: str | None = None
    attempts: dict[str, ShippedAttempt] = Field(default_factory=dict)
    done: bool = False
    ledger_bytes: int = 0
    trouble: str | None = None

    def has_all_of(self, ledger: Ledger) -> bool:
        """Whether nothing is left to be shipped; a retry has something again."""
        return self.done and self.ledger_bytes == ledger.size()


def read_shipped(ledger: Ledger) -> Shipped:
    """How much of a refresh MLflow has."""
    try:
        return Shipped.model_validate_json((ledger.folder / "mlflow.json").read_text())
    except FileNotFoundError:
        return Shipped()


def write_shipped(ledger: Ledger, shipped: Shipped) -> None:
    """Note how much of a refresh MLflow has."""
    write_atomically(ledger.folder / "mlflow.json", shipped.model_dump_json(indent=1))


def run_id_of(attempt: str | None) -> str | None:
    """The MLflow run of the attempt with this key (`REFRESH/STAGE-NUMBER`); None as long as MLflow does not have it."""
    if attempt is None:
        return None
    refresh, _, name = attempt.partition("/")
    shipped = read_shipped(ledger_of(refresh)).attempts.get(name)
    return shipped.run_id if shipped else None
