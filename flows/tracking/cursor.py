"""Progress of copying a refresh's ledger (event log) to MLflow, kept with its MLflow run ids in `mlflow.json`.

Only the shipper writes it. An attempt's run is recorded nowhere else.
"""

from pydantic import Field

from flows.ledger.refreshes import Ledger, ledger_of
from stages.core.contract import StrictModel
from stages.core.files import write_atomically

LAYOUTS = "layouts"
"""Prefix of the keys in `mlflow.json` for the runs of a comparison's layouts: `layouts/0`, `layouts/1`, …"""


class ShippedAttempt(StrictModel):
    """Progress of copying one attempt's metrics to MLflow. next_byte: of its `metrics.jsonl`, not copied yet."""

    run_id: str
    next_byte: int
    done: bool = False


class Shipped(StrictModel):
    """Contents of `mlflow.json`: how much of a refresh's ledger MLflow has, and the ids of its MLflow runs.

    done: MLflow has all of the ledger as it was when it had `ledger_bytes` bytes.
    """

    experiment_id: str | None = None
    parent_run_id: str | None = None
    attempts: dict[str, ShippedAttempt] = Field(default_factory=dict)
    done: bool = False
    ledger_bytes: int = 0
    trouble: str | None = None

    def has_all_of(self, ledger: Ledger) -> bool:
        """Return whether MLflow has all of a refresh's event log, which grows again when the refresh is retried."""
        return self.done and self.ledger_bytes == ledger.size()


def read_shipped(ledger: Ledger) -> Shipped:
    """Read from `mlflow.json` how much of a refresh's ledger (event log) has been copied to MLflow."""
    try:
        return Shipped.model_validate_json((ledger.folder / "mlflow.json").read_text())
    except FileNotFoundError:
        return Shipped()


def write_shipped(ledger: Ledger, shipped: Shipped) -> None:
    """Write to `mlflow.json` how much of a refresh's ledger (event log) has been copied to MLflow."""
    # Others read the file while a refresh runs (`pages.py`), and must find a whole one.
    write_atomically(ledger.folder / "mlflow.json", shipped.model_dump_json(indent=1))


def run_id_of(attempt: str | None) -> str | None:
    """Return the MLflow run id of an attempt by its key, `REFRESH/STAGE-NUMBER`; None while MLflow lacks it."""
    if attempt is None:
        return None
    refresh, _, name = attempt.partition("/")
    shipped = read_shipped(ledger_of(refresh)).attempts.get(name)
    return shipped.run_id if shipped else None
