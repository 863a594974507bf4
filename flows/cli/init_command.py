"""`lifecycle init`: a first recipe for a person's own rows."""

from __future__ import annotations

import re
from pathlib import Path

import click

from stages.core.errors import RecipeError


@click.command()
@click.option(
    "--data", required=True, type=click.Path(path_type=Path), metavar="FILE", help="JSONL, JSON, CSV, Parquet."
)
@click.option("--model", metavar="SOURCE", help="As a recipe's download has it; default: hf://Qwen/Qwen3-0.6B.")
@click.option("--folder", type=click.Path(path_type=Path), default=Path(), help="Where to write; default: here.")
def init(data: Path, model: str | None, folder: Path) -> None:
    """Write a commented recipe for rows of your own, and a task of those that training holds out."""
    from flows.planning.starter import DEFAULT_MODEL, starter

    name = re.sub(r"[^a-z0-9_-]+", "-", data.name.split(".")[0].lower()).strip("-_")[:60] or "mine"
    made = starter(name, data, model or DEFAULT_MODEL)
    if there := [file for file in made.files if (folder / file).exists()]:
        raise RecipeError(f"writing a first recipe: {folder / there[0]} exists already; remove it, or name a --folder")
    for file, text in made.files.items():
        (folder / file).parent.mkdir(parents=True, exist_ok=True)
        (folder / file).write_text(text, encoding="utf-8")
    click.echo("\n".join([*made.notes, *(f"wrote {folder / file}" for file in made.files)]))
    click.echo(f"lifecycle plan {folder / f'{name}.yaml'}")
