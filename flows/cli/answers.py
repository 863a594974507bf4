"""Output and shared options of commands: text, or with `--json` one JSON object alone on stdout."""

import json
import math
import shutil
import sys
from typing import Any

import click

JSON_OPTION = click.option("--json", "as_json", is_flag=True, help="Print one JSON object on stdout, nothing else.")
SET_OPTION = click.option(
    "--set",
    "overrides",
    multiple=True,
    metavar="KEY=VALUE",
    help="Override a field of the recipe, as in stages.sft.learning_rate=1e-4; repeatable.",
)


def print_json(value: Any) -> None:
    """Print an object as strict JSON, which has no NaN and no infinity: such numbers become null."""
    click.echo(json.dumps(_finite(value), indent=2, allow_nan=False))


def warn_of_missing_worker() -> None:
    """Print a warning on stderr when recipes are scheduled but no worker runs to start them."""
    from flows.servers.records import missing_worker

    if line := missing_worker():
        click.echo(line, err=True)


def terminal_width() -> int | None:
    """Return the terminal's width in characters; None where the output goes to a file or a program."""
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else None


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _finite(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
