"""`lifecycle render`: manifests for Kubernetes. Imports only what the command needs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import click


@click.command()
@click.argument("recipe", type=click.Path(path_type=Path))
@click.option("--stage", required=True, metavar="NAME", help="The stage to show; a serve stage becomes a Deployment.")
@click.option("--set", "overrides", multiple=True, metavar="KEY=VALUE", help="Override, as in `lifecycle run`.")
@click.option("--replicas", nargs=2, type=click.IntRange(1), default=(1, 4), show_default=True, metavar="LEAST MOST")
def render(recipe: Path, stage: str, overrides: Sequence[str], replicas: tuple[int, int]) -> None:
    """Print a stage as manifests, for `kubectl apply --filename -`."""
    import yaml

    from flows.cli.render import render
    from flows.launch.serving_manifests import Replicas

    found = render(recipe, stage, tuple(overrides), Replicas(*replicas))
    click.echo(yaml.safe_dump_all(found, sort_keys=False), nl=False)
