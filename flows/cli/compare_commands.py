"""Commands that measure layouts, and fit the layout planner to measurements: `lifecycle compare`, `calibrate`."""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from flows.cli.answers import JSON_OPTION, SET_OPTION, print_json, terminal_width


class ManyValues(click.Command):
    """Click command whose option `--layouts` takes several words, up to the next option, as a shell expands `*`."""

    OPTION = "--layouts"

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        spread: list[str] = []
        within = False
        for word in args:
            if word.startswith("-"):
                within = word == self.OPTION
            elif within and spread[-1] != self.OPTION:
                spread.append(self.OPTION)
            spread.append(word)
        return super().parse_args(ctx, spread)


@click.command(cls=ManyValues)
@click.argument("recipe", required=False, type=click.Path(path_type=Path))
@click.option("--stage", metavar="NAME", help="Train stage of the recipe to measure.")
@click.option(
    "--layouts",
    multiple=True,
    metavar="FILE|LAYOUT…",
    help='Parallel layouts to measure, such as "fsdp dp_shard=2" "megatron tp=2", or a file of them.',
)
@SET_OPTION
@click.option(
    "--steps",
    type=click.IntRange(1),
    default=20,
    show_default=True,
    help="Number of measured training steps of each run.",
)
@click.option(
    "--warmup",
    type=click.IntRange(0),
    default=5,
    show_default=True,
    help="Number of warm-up steps before the measured ones.",
)
@click.option(
    "--rounds",
    type=click.IntRange(1),
    default=2,
    show_default=True,
    help="Number of rounds; each round runs every layout once.",
)
@click.option(
    "--experiment",
    metavar="NAME",
    help="Compare training runs already in this MLflow experiment, instead of running any.",
)
@click.option(
    "--where", default="", metavar="FILTER", help="Compare only those MLflow runs that match this MLflow search filter."
)
@click.option(
    "--allow-mixed", is_flag=True, help="Compare MLflow runs although their hardware, code or training work differs."
)
@JSON_OPTION
def compare(
    recipe: Path | None,
    stage: str | None,
    layouts: Sequence[str],
    overrides: Sequence[str],
    steps: int,
    warmup: int,
    rounds: int,
    experiment: str | None,
    where: str,
    allow_mixed: bool,
    as_json: bool,
) -> int:
    """Run a few steps of a train stage under several layouts, in turns, and compare their speed and memory.

    With --experiment, compare runs that are in MLflow already.
    """
    if experiment and not (recipe or stage or layouts):
        return _compare_logged(experiment, where, allow_mixed, as_json)
    if experiment or where or allow_mixed or not (recipe and stage and layouts):
        raise click.UsageError(
            "give a RECIPE, its --stage and --layouts, or else --experiment with --where and --allow-mixed"
        )
    from flows.compare.plan import ComparisonRequest

    names = (str(recipe.absolute()), stage, tuple(layouts), tuple(overrides))
    return _measure(ComparisonRequest(*names, steps, warmup, rounds), as_json)


@click.command()
@click.option(
    "--experiment",
    default="llm-lifecycle",
    show_default=True,
    metavar="NAME",
    help="MLflow experiment whose training runs are used for the fit.",
)
@click.option(
    "--where",
    metavar="FILTER",
    help="MLflow search filter for the training runs to fit to; default: all runs of this machine.",
)
@click.option(
    "--out",
    type=click.Path(path_type=Path),
    help="Hardware file for the fitted constants; default: the file that predictions on this machine read.",
)
@click.option(
    "--measured",
    type=click.Path(path_type=Path),
    help="File of measurements by tests/benchmarks/gpu.py to fit to, instead of runs in MLflow; needs --out.",
)
@JSON_OPTION
def calibrate(experiment: str, where: str | None, out: Path | None, measured: Path | None, as_json: bool) -> None:
    """Fit the constants of the planner's predictions to training runs that MLflow has recorded."""
    from flows.cli.calibrate_run import as_object, as_text, calibrate_logged, calibrate_measured

    if measured is None:
        calibration, path = calibrate_logged(experiment, where, out)
    elif out is None or where is not None:
        raise click.UsageError("--measured may be of another machine: give --out FILE, and leave out --where")
    else:
        calibration, path = calibrate_measured(measured, out)
    print_json(as_object(calibration, path)) if as_json else click.echo(as_text(calibration, path))


def _compare_logged(experiment: str, where: str, allow_mixed: bool, as_json: bool) -> int:
    from flows.cli.compare_run import compare_logged
    from flows.report.layouts import as_json as rows_as_json
    from flows.report.layouts import as_text

    rows, report = compare_logged(experiment, where, allow_mixed=allow_mixed)
    if as_json:
        print_json({"experiment": experiment, "report": str(report), "layouts": rows_as_json(rows)})
    else:
        click.echo(f"{as_text(rows, terminal_width())}\n{report}")
    return 0


def _measure(request: Any, as_json: bool) -> int:
    from flows.cli.compare_run import exit_code, run_comparison
    from flows.report.layouts import as_text, comparison_as_json, rows_of

    run = run_comparison(request, stream=sys.stderr if as_json else sys.stdout)
    record = run.record
    rows = rows_of(record)
    if as_json:
        print_json(comparison_as_json(record, rows))
    else:
        click.echo(as_text(rows, terminal_width()))
        click.echo(f"{record.refresh}: {record.state} in {record.seconds:.1f} s {record.error or ''}".rstrip())
    return exit_code(record)
