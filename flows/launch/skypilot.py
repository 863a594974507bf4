"""SkyPilot task of a whole refresh on a machine that exists for it alone. Pure; SkyPilot itself is not imported.

The task syncs this code and the recipe's folder to the machine, makes the environments there, and runs the recipe. What
the home holds is kept in a bucket as a backup, restored before the next run: all stages that did not change are cached.
"""

import re
import shlex
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from pydantic import JsonValue

from flows.launch.local import code_folder
from flows.planning.devices import GPU
from flows.recipe.recipe import Recipe
from stages.core.errors import RecipeError
from stages.core.shipped import IN_WHEEL

RECIPES, BACKUPS = "~/lifecycle-recipes", "~/lifecycle-backups"
ACCELERATORS = re.compile(r"[A-Za-z0-9._-]+(?::([1-9][0-9]{0,3}))?")
RUN = """\
export LIFECYCLE_HOME="$HOME/lifecycle-home"
if [ ! -e "$LIFECYCLE_HOME" ] && ls {backups}/backups/*.json >/dev/null 2>&1; then
    .venv/bin/lifecycle restore {backups}
fi
code=0
.venv/bin/lifecycle {command} || code=$?
.venv/bin/lifecycle backup {backups} || exit
exit "$code"
"""
"""Script of the machine. The backup is made after a failure too: what was built before it stays."""


def skypilot_task(
    recipe: Recipe, file: Path, overrides: Sequence[str], accelerators: str, backups: str
) -> dict[str, Any]:
    """Return the SkyPilot task that refreshes by a recipe.

    accelerators: GPUs of the machine, such as `H100:8`. backups: bucket for the home's backups, such as `s3://ours`.
    Raises `RecipeError` for a recipe that needs more than that machine: other launchers, more GPUs, files elsewhere.
    """
    asked = ACCELERATORS.fullmatch(accelerators)
    if not asked:
        raise RecipeError(f"rendering for SkyPilot: found {accelerators!r}, expected GPUs such as H100:8")
    number = int(asked[1] or 1)
    problems = []
    if IN_WHEEL.exists():
        problems.append(
            f"a checkout goes along, whose Makefile installs it there; {code_folder()} is an installed wheel"
        )
    for name, config in recipe.stages.items():
        if not config.execution.is_local:
            launcher = config.execution.launcher
            problems.append(f"stages.{name}.execution.launcher: found {launcher}, expected local: there is one machine")
        if config.processes > number:
            problems.append(f"stages.{name}: has {config.processes} processes, but the machine has {number} GPUs")
        for path in (*config.outside_paths().values(), *_file_sources(config.model_dump(mode="json"))):
            if not path.is_relative_to(recipe.folder):
                problems.append(f"stages.{name}: {path} is not below the recipe's folder, which goes along")
    if problems:
        raise RecipeError("\n  ".join([f"{file.name} does not run on SkyPilot's machine:", *problems]))
    settings = [part for override in overrides for part in ("--set", override)]
    command = f"run {RECIPES}/{shlex.quote(file.name)} {shlex.join(settings)}".strip()
    return {
        "name": recipe.name.replace("_", "-"),
        "resources": {"accelerators": f"{asked[0].partition(':')[0]}:{number}"},
        "num_nodes": 1,
        "workdir": str(code_folder()),
        "file_mounts": {
            RECIPES: str(recipe.folder),
            # Backups are renamed into place, which a bucket that is mounted without a cache does not allow.
            BACKUPS: {"source": backups, "mode": "MOUNT_CACHED"},
        },
        "setup": f"make environments DEVICE={GPU.name}",
        "run": RUN.format(backups=BACKUPS, command=command),
    }


def _file_sources(tree: JsonValue) -> Iterator[Path]:
    """Yield the paths of all sources `file://…` in a stage's config."""
    for inner in tree.values() if isinstance(tree, dict) else tree if isinstance(tree, list) else ():
        if isinstance(inner, str) and inner.startswith("file://"):
            yield Path(inner.removeprefix("file://"))
        yield from _file_sources(inner)
