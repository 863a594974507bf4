"""Commands for work on a recipe before it runs: `lifecycle init`, `data`, `layouts`, `render`."""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from flows.cli.answers import JSON_OPTION, SET_OPTION, print_json
from stages.core.errors import RecipeError
from stages.core.lines import counted


@click.command()
@click.option(
    "--data",
    required=True,
    type=click.Path(path_type=Path),
    metavar="PATH",
    help="Your training data: a JSONL, JSON, CSV or Parquet file, or a folder of such files.",
)
@click.option(
    "--model", metavar="SOURCE", help="Model to train, in the syntax of recipes; default: hf://Qwen/Qwen3-0.6B."
)
@click.option(
    "--columns",
    multiple=True,
    metavar="THEIRS=OURS,…",
    help="Columns to rename: THEIRS is a column of your data, OURS the name that the data format expects.",
)
@click.option(
    "--folder",
    type=click.Path(path_type=Path),
    default=Path(),
    help="Folder to write the recipe to; default: the current one.",
)
def init(data: Path, model: str | None, columns: Sequence[str], folder: Path) -> None:
    """Write a commented recipe that trains on your own data, with an evaluation on held-out rows."""
    from flows.planning.starter import DEFAULT_MODEL, starter

    name = re.sub(r"[^a-z0-9_-]+", "-", data.absolute().name.split(".")[0].lower()).strip("-_")[:60] or "mine"
    made = starter(name, data, model or DEFAULT_MODEL, _renamed(columns))
    if existing := [file for file in made.files if (folder / file).exists()]:
        raise RecipeError(
            f"writing a first recipe: {folder / existing[0]} exists already; remove it, or name a --folder"
        )
    for file, content in made.files.items():
        (folder / file).parent.mkdir(parents=True, exist_ok=True)
        (folder / file).write_bytes(content.encode() if isinstance(content, str) else content)
    wrote = [f"wrote {folder / file}" for file, content in made.files.items() if isinstance(content, str)]
    if num_pictures := len(made.files) - len(wrote):
        wrote.append(f"wrote {counted(num_pictures, 'picture')} into {folder / 'tasks' / 'pictures'}")
    click.echo("\n".join([*made.notes, *wrote]))
    click.echo(f"lifecycle plan {folder / f'{name}.yaml'}")


def _renamed(options: Sequence[str]) -> dict[str, str]:
    """Return the data format's column name for each of the user's column names. Raises RecipeError for bad options."""
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


@click.command()
@click.argument("recipe", type=click.Path(path_type=Path))
@click.option("--stage", required=True, metavar="NAME", help="Name of a train or generate stage of the recipe.")
@click.option(
    "--rows",
    "num_rows",
    type=click.IntRange(1, 1000),
    default=5,
    show_default=True,
    help="Number of training rows to show.",
)
@SET_OPTION
@click.option(
    "--download", is_flag=True, help="Download the dataset and the model first, if they are not in the store yet."
)
@click.option(
    "--html",
    "page",
    type=click.Path(path_type=Path),
    help="File for the HTML page; default: one below the lifecycle home.",
)
@JSON_OPTION
def data(
    recipe: Path, stage: str, num_rows: int, overrides: Sequence[str], download: bool, page: Path | None, as_json: bool
) -> None:
    """Show a stage's training data as the model sees it, before any training: what is learned, cut off and left out.

    Learned tokens are green; where there are no colours, ⟦ and ⟧ enclose them.
    """
    from flows.cli.data_views import print_look, write_page
    from flows.cli.store_commands import NullObserver
    from flows.running.data_look import LookRequest, look_at_data

    request = LookRequest(recipe.absolute(), stage, tuple(overrides), num_rows, download)
    look = look_at_data(request, NullObserver())
    written = write_page(look, recipe, stage, page)
    if as_json:
        print_json({"page": str(written), **look.model_dump(mode="json")})
    else:
        print_look(look)
        click.echo(f"as a page: {written}")


@click.command()
@click.argument("model", required=False, metavar="RECIPE|MODEL_CONFIG")
@click.option("--stage", metavar="NAME", help="Train stage of the recipe; default: the first one.")
@click.option(
    "--gpus", "num_gpus", type=int, help="Number of devices to plan for, those of a sampling server included."
)
@click.option(
    "--gpu",
    default="h100-80gb",
    show_default=True,
    metavar="NAME|YAML",
    help="Type of the devices, such as a GPU's name.",
)
@click.option("--gpus-per-node", type=int, help="Number of devices in a node; default: the usual number for this type.")
@click.option(
    "--seq-len", type=int, help="Tokens in a packed row (the sequence length); default: the recipe's, else 4096."
)
@click.option(
    "--global-batch-size",
    type=int,
    help="Packed rows in a training step (the global batch size); default: the recipe's, else 1024.",
)
@click.option(
    "--precision",
    type=click.Choice(["fp32", "bf16", "fp8"]),
    help="Training precision; default: the recipe's, else bf16.",
)
@click.option(
    "--lora-rank", type=int, help="Train LoRA adapters of this rank; default: the recipe's rank, else the whole model."
)
@click.option(
    "--tokens",
    type=float,
    help="Number of tokens in the whole training, to predict its duration; default: from the recipe, if it sets the "
    "number of steps.",
)
@click.option(
    "--engine", type=click.Choice(["fsdp", "megatron"]), help="Training engine; default: both engines are searched."
)
@click.option("--top", type=click.IntRange(1), default=10, show_default=True, help="Number of best layouts to show.")
@click.option(
    "--explain", metavar="LAYOUT", help='Explain only this parallel layout, in full, as in "dp_shard=2 tp=4 pp=2".'
)
@JSON_OPTION
def layouts(
    model: str | None,
    num_gpus: int | None,
    explain: str | None,
    top: int,
    as_json: bool,
    **options: Any,
) -> None:
    """Rank all parallel layouts of a model on a cluster by predicted step time and memory, and explain the best."""
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


@click.command()
@click.argument("recipe", type=click.Path(path_type=Path))
@click.option("--stage", metavar="NAME", help="Stage to print as manifests; a serve stage becomes a Deployment.")
@SET_OPTION
@click.option("--replicas", nargs=2, type=click.IntRange(1), default=(1, 4), show_default=True, metavar="LEAST MOST")
@click.option(
    "--monitored-from",
    metavar="NAMESPACE",
    help="Also print a PodMonitor, and let Prometheus of that namespace in; for clusters with Prometheus Operator.",
)
@click.option(
    "--skypilot",
    nargs=2,
    metavar="GPUS BUCKET",
    help="Instead print a SkyPilot task for the whole refresh, on a machine with GPUs such as H100:8, with backups of "
    "its home in a bucket such as s3://ours.",
)
def render(
    recipe: Path,
    stage: str | None,
    overrides: Sequence[str],
    replicas: tuple[int, int],
    monitored_from: str | None,
    skypilot: tuple[str, str] | None,
) -> None:
    """Print Kubernetes manifests of a stage, for `kubectl apply --filename -`, or a SkyPilot task, for `sky launch`."""
    import yaml

    if bool(stage) == bool(skypilot):
        raise click.UsageError("expected one of --stage and --skypilot")
    if not stage:
        from flows.launch.skypilot import skypilot_task
        from flows.recipe.recipe import load_recipe

        assert skypilot
        task = skypilot_task(load_recipe(recipe, overrides), recipe, overrides, *skypilot)
        click.echo(yaml.safe_dump(task, sort_keys=False), nl=False)
        return
    from flows.cli.render import stage_manifests
    from flows.launch.serving_manifests import Replicas

    manifests = stage_manifests(recipe, stage, tuple(overrides), Replicas(*replicas, monitored_from))
    click.echo(yaml.safe_dump_all(manifests, sort_keys=False), nl=False)
