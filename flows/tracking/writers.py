"""Writers of runs into trackers beside MLflow, each a package of its own that is imported only where it writes.

A writer gets the metrics of one attempt at a stage, step by step, each value once.
"""

import os
from collections.abc import Callable, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any, Protocol

from flows.tracking.rows import MetricRow

PROJECT = "llm-lifecycle"


class Writer(Protocol):
    """Open run of a tracker."""

    def log(self, rows: Sequence[MetricRow]) -> None:
        """Write metric values, whose steps never go back."""

    def finish(self) -> None:
        """Write what is left and close the run."""


class TensorBoard:
    """Event file in the run's folder, for `tensorboard --logdir`."""

    def __init__(self, folder: Path, refresh: str, name: str, config: Mapping[str, str]) -> None:
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        self._event, self._summary = Event, Summary
        self._file = EventFileWriter(str(folder))

    def log(self, rows: Sequence[MetricRow]) -> None:
        for row in rows:
            value = self._summary.Value(tag=row.name, simple_value=row.value)
            summary = self._summary(value=[value])
            self._file.add_event(self._event(wall_time=row.time_ms / 1000, step=row.step, summary=summary))

    def finish(self) -> None:
        self._file.close()


class WeightsAndBiases:
    """Run of Weights & Biases: sent to its server, or with WANDB_MODE=offline kept for `wandb sync`."""

    def __init__(self, folder: Path, refresh: str, name: str, config: Mapping[str, str]) -> None:
        import wandb

        settings = wandb.Settings(console="off", silent=True, disable_git=True, disable_code=True, x_disable_stats=True)
        self._run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", PROJECT),
            id=f"{refresh}-{name}",
            name=name,
            group=refresh,
            dir=str(folder),
            config=dict(config),
            resume="allow",
            reinit="create_new",
            settings=settings,
        )

    def log(self, rows: Sequence[MetricRow]) -> None:
        for step, of_step in groupby(rows, lambda row: row.step):
            self._run.log({row.name: row.value for row in of_step}, step=step)

    def finish(self) -> None:
        self._run.finish()


class SwanLab:
    """Experiment of SwanLab, one at a time: sent to its server, or with SWANLAB_MODE=offline kept in its folder."""

    def __init__(self, folder: Path, refresh: str, name: str, config: Mapping[str, str]) -> None:
        self._settings: dict[str, Any] = {
            "project": os.environ.get("SWANLAB_PROJECT", PROJECT),
            "experiment_name": f"{refresh}-{name}",
            "group": refresh,
            "logdir": str(folder),
            "config": dict(config),
        }
        self._rows: list[MetricRow] = []

    def log(self, rows: Sequence[MetricRow]) -> None:
        # Attempts may run side by side, and a process has one experiment: it is written at the attempt's end.
        self._rows += rows

    def finish(self) -> None:
        import swanlab

        run = swanlab.init(**self._settings)
        for step, of_step in groupby(self._rows, lambda row: row.step):
            run.log({row.name: row.value for row in of_step}, step=step)
        swanlab.finish()


WRITERS: dict[str, Callable[[Path, str, str, Mapping[str, str]], Writer]] = {
    "tensorboard": TensorBoard,
    "wandb": WeightsAndBiases,
    "swanlab": SwanLab,
}
