"""Predict step time and memory of the training runs in a CSV table: write the same table with `pred_…` columns added.

python tests/benchmarks/predict_table.py runs.csv --out predicted.csv

`published_runs.py` lists the columns that are read.
"""

import argparse
import csv
import sys
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[2]))

from stages.core.errors import DataError, LifecycleError
from stages.planner.memory import memory
from stages.planner.time import step_time
from tests.benchmarks.published_runs import FIRST_LINE, PublishedRun, UnknownRun, read_table

PREDICTED = ("pred_step_time_s", "pred_memory_gb", "pred_tok_s_gpu", "pred_oom", "pred_assumed")


def main() -> None:
    """Write the CSV table given on the command line with predictions added, and print the assumptions made."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("table", type=Path, metavar="CSV")
    parser.add_argument(
        "--out",
        type=Path,
        required=True,
        metavar="CSV",
        help="CSV file to write: the input table with the columns of predictions added",
    )
    arguments = parser.parse_args()
    try:
        summary = predict_table(arguments.table, arguments.out)
    except LifecycleError as error:
        sys.exit(str(error))
    print(f"{summary.num_predicted} of {summary.num_rows} rows predicted → {arguments.out}")
    for assumption, count in summary.assumed:
        print(f"  assumed {assumption} ({count} rows)")
    for line, reason in summary.unknown:
        print(f"  line {line} not predicted: {reason}")


@dataclass(frozen=True)
class Summary:
    """Summary of a CSV table's predictions: numbers of runs, assumptions made, and runs that cannot be predicted."""

    num_rows: int
    num_predicted: int
    assumed: tuple[tuple[str, int], ...]
    """Assumptions made for empty cells of the CSV table, most frequent first, each with the number of affected rows."""
    unknown: tuple[tuple[int, str], ...]
    """Line number of each row whose run cannot be predicted, with the reason."""


def predict_table(table: Path, out: Path) -> Summary:
    """Write a CSV table of runs with predictions of step time and memory added to `out`. Raises DataError.

    Memory is in GiB of the fullest rank, as tools report it; `pred_oom` is 1 where that is more than the device has;
    `pred_assumed` names the defaults taken for empty cells, or says why there is no prediction.
    """
    header, runs = read_table(table)
    try:
        with out.open("w", newline="") as file:
            writer = csv.DictWriter(file, [*header, *PREDICTED])
            writer.writeheader()
            for run in runs:
                writer.writerow({**run.cells, **predicted_cells(run)})
    except OSError as error:
        raise DataError(f"writing the predictions to {out}: {error}") from error
    known = [run for run in runs if isinstance(run, PublishedRun)]
    assumed = Counter(assumption for run in known for assumption in run.assumed)
    unknown = [(line, run.reason) for line, run in enumerate(runs, FIRST_LINE) if isinstance(run, UnknownRun)]
    return Summary(len(runs), len(known), tuple(assumed.most_common()), tuple(unknown))


def predicted_cells(run: PublishedRun | UnknownRun) -> dict[str, str]:
    """Return a run's new CSV cells: predicted step time, memory, tokens/s, out-of-memory, and assumptions made."""
    if isinstance(run, UnknownRun):
        return {**dict.fromkeys(PREDICTED, ""), "pred_assumed": f"not predicted: {run.reason}"}
    peak_gib = predicted_memory_gib(run)
    seconds = predicted_step_time_s(run)
    rate = run.workload.tokens_per_step / seconds / run.layout.world_size
    oom = int(peak_gib > run.hardware.memory_gib)
    cells = (f"{seconds:.4f}", f"{peak_gib:.2f}", f"{rate:.2f}", str(oom), "; ".join(run.assumed))
    return dict(zip(PREDICTED, cells, strict=True))


def predicted_step_time_s(run: PublishedRun) -> float:
    """Return the seconds of an optimizer step that the planner predicts for a published run."""
    estimate = step_time(run.shape, run.engine, run.layout, run.workload, run.hardware, software=run.software)
    return estimate.step_time_s


def predicted_memory_gib(run: PublishedRun) -> float:
    """Return the peak memory in GiB that the planner predicts for a published run, of the process that uses most."""
    efficiency = run.hardware.efficiency
    needed = memory(run.shape, run.engine, run.layout, run.workload, software=run.software, efficiency=efficiency)
    return needed.peak_gib


if __name__ == "__main__":
    main()
