"""The record of a comparison: what was asked for, every trial, and how it ended. Files, no server needed.

<home>/comparisons/<comparison>/
    comparison.json     `ComparisonRecord`, written after every trial
    trials/0-1/         work folder of the first layout's first round: config, log, metrics of its steps
    report.html         tables and plots
    mlflow.json         how much of it has reached MLflow; written by `flows/tracking/comparison_shipper.py` only
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Literal

from pydantic import Field, ValidationError

from flows.ledger.home import home
from flows.ledger.process_identity import ProcessIdentity
from stages.core.contract import StrictModel
from stages.core.errors import StoreError
from stages.core.files import write_atomically

ComparisonState = Literal["running", "completed", "failed", "cancelled"]


class LayoutEntry(StrictModel):
    """A layout that is compared. `params` and `tags` are those that a run of the stage under it has in MLflow.

    `refused`: why it cannot work, and so is not tried; such layouts come last.
    """

    text: str
    engine: str
    num_devices: int
    global_batch_size: int
    params: dict[str, str]
    tags: dict[str, str]
    refused: str | None = None


class TrialEntry(StrictModel):
    """One layout in one round: the figures of its steps, the final ones, or why there are none."""

    layout: int = Field(description="its place in the list of layouts")
    round: int = Field(description="counted from 1")
    started_ms: int
    seconds: float
    steps: list[dict[str, float]] = Field(default_factory=list)
    metrics: dict[str, float] = Field(default_factory=dict)
    tags: dict[str, str] = Field(default_factory=dict)
    error: str | None = None
    error_class: str | None = None


class ComparisonRecord(StrictModel):
    """`comparison.json`."""

    comparison: str
    recipe: str
    recipe_path: Path
    overrides: tuple[str, ...] = ()
    stage: str
    num_steps: int = Field(description="measured steps of a trial")
    num_warmup_steps: int = Field(description="steps before them")
    num_rounds: int
    state: ComparisonState = "running"
    started_ms: int
    seconds: float = 0.0
    process: ProcessIdentity
    hardware: str
    git_commit: str | None
    prefect_flow_run_id: str | None = None
    layouts: tuple[LayoutEntry, ...]
    trials: tuple[TrialEntry, ...] = ()
    error: str | None = None

    def trials_of(self, layout: int) -> list[TrialEntry]:
        """All rounds of a layout, in order."""
        return [trial for trial in self.trials if trial.layout == layout]


class ShippedComparison(StrictModel):
    """`mlflow.json`: the runs, in the order of the layouts."""

    experiment_id: str
    parent_run_id: str
    run_ids: tuple[str, ...]


class ComparisonFolder:
    """The folder of one comparison."""

    def __init__(self, path: Path):
        self.path = path

    @property
    def report(self) -> Path:
        return self.path / "report.html"

    def work_folder(self, layout: int, round_number: int) -> Path:
        """Where a trial works."""
        return self.path / "trials" / f"{layout}-{round_number}"

    def read(self) -> ComparisonRecord:
        """Raises `StoreError` when there is none, or it cannot be read."""
        try:
            return ComparisonRecord.model_validate_json((self.path / "comparison.json").read_text())
        except (OSError, ValidationError) as error:
            raise StoreError(f"reading the record of comparison {self.path.name}: {error}") from error

    def write(self, record: ComparisonRecord) -> None:
        self.path.mkdir(parents=True, exist_ok=True)
        write_atomically(self.path / "comparison.json", record.model_dump_json(indent=1))

    def read_shipped(self) -> ShippedComparison | None:
        try:
            return ShippedComparison.model_validate_json((self.path / "mlflow.json").read_text())
        except FileNotFoundError:
            return None

    def write_shipped(self, shipped: ShippedComparison) -> None:
        write_atomically(self.path / "mlflow.json", shipped.model_dump_json(indent=1))


def comparison_folder(comparison: str) -> ComparisonFolder:
    """Where the comparison of this id is, or will be, recorded."""
    return ComparisonFolder(_root() / comparison)


def comparisons() -> Iterator[ComparisonFolder]:
    """All recorded comparisons, newest first."""
    for file in sorted(_root().glob("*/comparison.json"), key=lambda file: file.stat().st_mtime, reverse=True):
        yield ComparisonFolder(file.parent)


def _root() -> Path:
    return home() / "comparisons"
