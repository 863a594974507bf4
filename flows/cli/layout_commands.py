"""`lifecycle layouts`: the fastest layout of a model on a cluster, predicted. Imports only what a command needs."""

from __future__ import annotations

from typing import Any

import click

from flows.cli.answers import JSON_OPTION, print_json


@click.command()
@click.argument("model", required=False, metavar="RECIPE|MODEL_CONFIG")
@click.option("--stage", metavar="NAME", help="Train stage of the recipe; default: its first.")
@click.option("--gpus", "num_gpus", type=int, help="How many devices, those of a server that samples included.")
@click.option("--gpu", default="h100-80gb", show_default=True, metavar="NAME|YAML", help="Which devices.")
@click.option("--gpus-per-node", type=int, help="Default: as such nodes usually have.")
@click.option("--seq-len", type=int, help="Tokens of a row; default: the recipe's, else 4096.")
@click.option("--global-batch-size", type=int, help="Rows of a step; default: the recipe's, else 1024.")
@click.option("--precision", type=click.Choice(["fp32", "bf16", "fp8"]), help="Default: the recipe's, else bf16.")
@click.option("--lora-rank", type=int, help="Train adapters of this rank; default: the recipe's, if it trains any.")
@click.option("--tokens", type=float, help="Tokens of the whole training; default: the recipe's, if it counts steps.")
@click.option("--engine", type=click.Choice(["fsdp", "megatron"]), help="Default: both.")
@click.option("--top", type=click.IntRange(1), default=10, show_default=True, help="Layouts to show.")
@click.option("--explain", metavar="LAYOUT", help='Only this one, in full: "dp_shard=2 tp=4 pp=2".')
@JSON_OPTION
def layouts(
    model: str | None,
    num_gpus: int | None,
    explain: str | None,
    top: int,
    as_json: bool,
    **options: Any,
) -> None:
    """Rank all layouts of a model on a cluster by predicted step time, with memory, and say why."""
    if model is None or num_gpus is None:
        raise click.UsageError("expected a recipe, a config.json or the name of a model, and --gpus NUMBER")
    from flows.cli import layout_table
    from flows.planning.layout_advice import LayoutOptions, explained, ranked, search_request

    request = search_request(model, LayoutOptions(num_gpus=num_gpus, **options))
    if explain:
        answer = explained(request, explain)
        shown = layout_table.explained_as_json(answer) if as_json else layout_table.explained_as_text(answer)
    else:
        ranking = ranked(request, top)
        shown = layout_table.ranked_as_json(ranking) if as_json else layout_table.ranked_as_text(ranking)
    (print_json if as_json else click.echo)(shown)
