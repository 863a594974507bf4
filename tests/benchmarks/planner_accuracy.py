"""Benchmark of the layout planner: errors of its predicted step times and memory on published training runs.

Prints errors of step time and memory, ranking of layouts, and predicted out-of-memory; asserts nothing.

python tests/benchmarks/planner_accuracy.py                  # with the constants in the code
python tests/benchmarks/planner_accuracy.py --fit            # fit them again, on the sources of FIT only
python tests/benchmarks/planner_accuracy.py --leave-one-out  # fit on all sources of FIT but one, for each
python tests/benchmarks/planner_accuracy.py --tables *.csv   # by other tables of published runs (see published_runs.py)
"""

import argparse
import math
import statistics
import sys
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from planner_runs import Measured, all_runs, runs_of
from scipy.stats import spearmanr

from stages.planner import compute
from stages.planner.hardware import Efficiency
from stages.planner.search import memory_fit
from tests.benchmarks.predict_table import predicted_memory_gib

FIT = ("MPT a100-80gb", "vTrain 1024 wide", "Megatron-LM 2020")
"""Sources of published runs that the planner's constants are fitted to; all other sources are held out."""
FITTED = (
    "matmul", "matmul_half_waves", "matmul_half_depth", "first_flash_attention", "memory", "intra_link", "overlapped",
    "launch_s",
)  # fmt: skip
BOUNDS = {"matmul": 0.95, "memory": 0.95, "intra_link": 0.95, "overlapped": 1.0}
LARGEST_ERROR = 0.7
"""Cap on the absolute log error of a run's predicted step time, so that outliers do not dominate the fit."""
SMALLEST_STEP = 0.005
"""Relative change of a constant below which the fit has converged."""
RUNS_OF_A_SOURCE = 80
LEAST_GROUP = 3
TITLES = (
    f"{'step time':<22} {'':<9} "
    f"{'runs':>5} {'mean':>6} {'median':>7} {'bias':>6} {'groups':>7} {'rank':>5} {'regret':>7}"
)


def main() -> None:
    """Read the command line, and print the planner's errors on the published runs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--fit", action="store_true")
    parser.add_argument("--leave-one-out", action="store_true")
    parser.add_argument(
        "--tables",
        type=Path,
        nargs="+",
        default=[],
        metavar="CSV",
        help="CSV tables of published runs to compare with instead of the built-in ones",
    )
    arguments = parser.parse_args()
    runs = all_runs()
    if arguments.tables:
        tables = [runs_of(table) for table in arguments.tables]
        for rows in tables:
            print_table(rows)
        print_kept_back([run for rows in tables for run in rows])
        return
    if arguments.leave_one_out:
        print_leave_one_out(runs)
        return
    efficiency = fit([run for run in runs if run.source in FIT]) if arguments.fit else None
    if efficiency:
        print(*(f"{name} = {getattr(efficiency, name):.4g}" for name in FITTED), sep="\n")
    print_times(runs, efficiency)
    print_memory(runs, efficiency)


def print_times(runs: Sequence[Measured], efficiency: Efficiency | None) -> None:
    """Print the planner's errors in predicting step time, by source of the published runs.

    Beside them: rank correlation of times within a group of layouts, and regret of choosing the predicted fastest.
    """
    print(f"\n{TITLES}")
    by_source = _by_source(run for run in runs if run.step_time_s)
    for source, members in sorted(by_source.items(), key=lambda item: (item[0] not in FIT, item[0])):
        print_line(source, "fitted" if source in FIT else "held out", members, efficiency)
    for label, is_fitted in (("fitted", True), ("held out", False)):
        members = [run for name, group in by_source.items() if (name in FIT) == is_fitted for run in group]
        print_line("all", label, members, efficiency)


def print_line(source: str, label: str, runs: Sequence[Measured], efficiency: Efficiency | None) -> None:
    """Print a line with the planner's step time errors on the published runs of one source."""
    errors = [run.predicted_s(efficiency) / run.step_time_s - 1 for run in runs]
    ranks, regrets = _rankings(runs, efficiency)
    mean, median = (average(map(abs, errors)) for average in (statistics.mean, statistics.median))
    rank = f"{statistics.median(ranks):5.2f}" if ranks else "    -"
    regret = f"{statistics.median(regrets):7.1%}" if regrets else "      -"
    bias = statistics.median(errors)
    print(
        f"{source:<22} {label:<9} {len(runs):>5} {mean:6.1%} {median:7.1%} {bias:+6.1%} {len(ranks):>7} {rank} {regret}"
    )


def print_memory(runs: Sequence[Measured], efficiency: Efficiency | None) -> None:
    """Print errors of predicted peak memory by source, and whether runs were rightly predicted to fit.

    Whether they fit is counted for runs that state their program, even where they state no memory.
    """
    by_source = _by_source(run for run in runs if run.memory_gib)
    print(f"\n{'memory':<22} {'runs':>5} {'mean':>6} {'median':>7} {'bias':>6}")
    for source, members in by_source.items():
        errors = [run.predicted_gib(efficiency) / run.memory_gib - 1 for run in members]
        mean, median = (average(map(abs, errors)) for average in (statistics.mean, statistics.median))
        print(f"{source:<22} {len(members):>5} {mean:6.1%} {median:7.1%} {statistics.median(errors):+6.1%}")
    print_verdicts([run for run in runs if run.has_software])


def print_table(runs: Sequence[Measured]) -> None:
    """Print the planner's errors on a table of runs named on the command line: step time, then memory and fit."""
    print(f"\n{runs[0].table}: {len(runs)} runs\n{TITLES}")
    by_source = _by_source(runs)
    for trained in sorted({source.split()[0] for source in by_source}):
        members = {name: group for name, group in by_source.items() if name.split()[0] == trained}
        print_line(trained, "all", [run for group in members.values() for run in group], None)
        for name, group in sorted(members.items()):
            print_line(f"  {name}", "", group, None)
    for source, members in by_source.items():
        errors = [run.predicted_gib() / run.memory_gib - 1 for run in members if run.memory_gib]
        if errors:
            print(f"memory of {source}: {len(errors)} runs, mean error {statistics.mean(map(abs, errors)):.1%}")
    print_verdicts([run for run in runs if run.has_software])


def print_verdicts(runs: Sequence[Measured]) -> None:
    """Count how often `lifecycle layouts`'s verdict on memory is right, for runs that ran and ones that ran out."""
    verdicts = Counter(
        (run.out_of_memory, memory_fit(predicted_memory_gib(run.run), run.run.hardware.memory_gib)) for run in runs
    )
    for out_of_memory, verdict in sorted(verdicts):
        what = "ran out of memory" if out_of_memory else "ran"
        print(f"{what}, said: {verdict}: {verdicts[out_of_memory, verdict]}")


def print_kept_back(runs: Sequence[Measured]) -> None:
    """Print step time errors for runs known at the fit and for held-out ones, with undescribed programs apart."""
    print(f"\n{'all tables':<22} {'':<9} {TITLES[len('step time') + 24 :]}")
    for is_seen, label in ((True, "seen"), (False, "kept back")):
        for has_software, name in ((True, "software known"), (False, "unknown")):
            members = [run for run in runs if (run.is_seen, run.has_software) == (is_seen, has_software)]
            if members:
                print_line(name, label, members, None)


def print_leave_one_out(runs: Sequence[Measured]) -> None:
    """Cross-validate the planner: print its error on each source of runs with constants fitted to the other sources."""
    for left_out in FIT:
        efficiency = fit([run for run in runs if run.source in FIT and run.source != left_out])
        print_line(
            left_out, "left out", [run for run in runs if run.source == left_out and run.step_time_s], efficiency
        )


def fit(runs: Iterable[Measured]) -> Efficiency:
    """Return the planner's constants, fitted by coordinate descent to the mean absolute log error, sources equal."""
    by_source = {
        source: members[:: max(1, len(members) // RUNS_OF_A_SOURCE)]
        for source, members in _by_source(run for run in runs if run.step_time_s).items()
    }
    best, steps = Efficiency(), dict.fromkeys(FITTED, 0.25)
    least = _loss(by_source, best)
    while max(steps.values()) > SMALLEST_STEP:
        for name in FITTED:
            improved = False
            for factor in (1 + steps[name], 1 / (1 + steps[name])):
                value = getattr(best, name) * factor
                candidate = replace(best, **{name: value})
                if value <= BOUNDS.get(name, math.inf) and (loss := _loss(by_source, candidate)) < least:
                    best, least, improved = candidate, loss, True
            steps[name] *= 1.0 if improved else 0.5
    return best


def _loss(by_source: dict[str, list[Measured]], efficiency: Efficiency) -> float:
    compute.layer_time.cache_clear()
    compute.head_time.cache_clear()
    return statistics.mean(
        statistics.mean(
            min(LARGEST_ERROR, abs(math.log(run.predicted_s(efficiency) / run.step_time_s))) for run in members
        )
        for members in by_source.values()
    )


def _rankings(runs: Sequence[Measured], efficiency: Efficiency | None) -> tuple[list[float], list[float]]:
    """Return Spearman's rank correlation and regret for each group of runs' layouts.

    The regret is the relative time lost by choosing the layout that is predicted to be fastest.
    """
    groups: dict[tuple[object, ...], list[Measured]] = defaultdict(list)
    for run in runs:
        groups[run.group].append(run)
    ranks, regrets = [], []
    for members in groups.values():
        measured = [run.step_time_s for run in members]
        if len({run.run.layout.model_dump_json() for run in members}) < LEAST_GROUP:
            continue
        predicted = [run.predicted_s(efficiency) for run in members]
        ranks.append(float(spearmanr(measured, predicted).statistic))
        regrets.append(measured[predicted.index(min(predicted))] / min(measured) - 1)
    return ranks, regrets


def _by_source(runs: Iterable[Measured]) -> dict[str, list[Measured]]:
    by_source: dict[str, list[Measured]] = defaultdict(list)
    for run in runs:
        by_source[run.source].append(run)
    return by_source


if __name__ == "__main__":
    main()
