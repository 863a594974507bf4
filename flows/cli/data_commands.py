"""`lifecycle data`: what a stage will see of its data. Imports only what the command needs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import click

from flows.cli.answers import JSON_OPTION, print_json


@click.command()
@click.argument("recipe", type=click.Path(path_type=Path))
@click.option("--stage", required=True, metavar="NAME", help="A stage that trains or generates.")
@click.option("--rows", "num_rows", type=click.IntRange(1, 1000), default=5, show_default=True, help="Rows to show.")
@click.option("--set", "overrides", multiple=True, metavar="KEY=VALUE", help="Override, as in `lifecycle run`.")
@click.option("--download", is_flag=True, help="Fetch the data and the model from elsewhere, if they are not here yet.")
@click.option("--html", "page", type=click.Path(path_type=Path), help="Where the page goes; default: below the home.")
@JSON_OPTION
def data(
    recipe: Path, stage: str, num_rows: int, overrides: Sequence[str], download: bool, page: Path | None, as_json: bool
) -> None:
    """Show the rows of a stage as the model sees them, before any training: what is learned, cut off and left out.

    Learned tokens are green; where there are no colours, ⟦ and ⟧ enclose them.
    """
    from flows.cli.data_page import write_page
    from flows.cli.data_text import print_look
    from flows.cli.store_commands import Silent
    from flows.running.data_look import LookRequest, look_at_data

    request = LookRequest(recipe.absolute(), stage, tuple(overrides), num_rows, download)
    look = look_at_data(request, Silent())
    written = write_page(look, recipe, stage, page)
    if as_json:
        print_json({"page": str(written), **look.model_dump(mode="json")})
    else:
        print_look(look)
        click.echo(f"as a page: {written}")
