"""`lifecycle init`: a first recipe for a person's own rows."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

import click

from stages.core.errors import RecipeError


@click.command()
@click.option(
    "--data",
    required=True,
    type=click.Path(path_type=Path),
    metavar="PATH",
    help="JSONL, JSON, CSV, Parquet, a folder.",
)
@click.option("--model", metavar="SOURCE", help="As a recipe's download has it; default: hf://Qwen/Qwen3-0.6B.")
@click.option("--columns", multiple=True, metavar="THEIRS=OURS,…", help="Names of columns that formats have otherwise.")
@click.option("--folder", type=click.Path(path_type=Path), default=Path(), help="Where to write; default: here.")
def init(data: Path, model: str | None, columns: Sequence[str], folder: Path) -> None:
    """Write a commented recipe for rows of your own, and a task of those that training holds out."""
    from flows.planning.starter import DEFAULT_MODEL, starter

    name = re.sub(r"[^a-z0-9_-]+", "-", data.absolute().name.split(".")[0].lower()).strip("-_")[:60] or "mine"
    made = starter(name, data, model or DEFAULT_MODEL, _renamed(columns))
    if there := [file for file in made.files if (folder / file).exists()]:
        raise RecipeError(f"writing a first recipe: {folder / there[0]} exists already; remove it, or name a --folder")
    for file, text in made.files.items():
        (folder / file).parent.mkdir(parents=True, exist_ok=True)
        (folder / file).write_text(text, encoding="utf-8")
    click.echo("\n".join([*made.notes, *(f"wrote {folder / file}" for file in made.files)]))
    click.echo(f"lifecycle plan {folder / f'{name}.yaml'}")


def _renamed(options: Sequence[str]) -> dict[str, str]:
    """Their name of each column → ours. Raises RecipeError."""
    from flows.recipe.text import closest
    from stages.core.redaction import quoted
    from stages.data.formats import COLUMN_NAMES

    pairs = [pair for option in options for pair in option.split(",")]
    renamed: dict[str, str] = {}
    for pair in pairs:
        theirs, _, ours = (word.strip() for word in pair.rpartition("="))
        if not theirs or not ours:
            raise RecipeError(
                f"reading --columns: found {quoted(pair, 100)}; expected THEIRS=OURS, such as question=prompt"
            )
        if ours not in COLUMN_NAMES:
            raise RecipeError(
                f"reading --columns: {quoted(ours, 100)} is no column of a format{closest(ours, sorted(COLUMN_NAMES))}"
            )
        if theirs in renamed or ours in renamed.values():
            raise RecipeError(f"reading --columns: {quoted(pair, 100)} names a column twice; expected each once")
        renamed[theirs] = ours
    return renamed
