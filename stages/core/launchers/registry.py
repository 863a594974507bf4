"""Registry of launchers, and the fields of `execution` in a recipe that choose a launcher and set its options.

A new launcher is a module beside this one and a line here; a cluster also has a module and a line in `flows/launch/`.
"""

from typing import TYPE_CHECKING, Literal, TypeVar

from pydantic import Field, create_model

from stages.core.fields import StrictModel
from stages.core.launchers.kubernetes import KubernetesOptions
from stages.core.launchers.launcher import LauncherOptions
from stages.core.launchers.local import LocalOptions
from stages.core.launchers.ray import RayOptions
from stages.core.launchers.slurm import SlurmOptions

LAUNCHERS: dict[str, type[LauncherOptions]] = {
    "local": LocalOptions,
    "slurm": SlurmOptions,
    "kubernetes": KubernetesOptions,
    "ray": RayOptions,
}
BLOCKS = {name: options for name, options in LAUNCHERS.items() if options.model_fields}
"""Options class of each launcher that has options in `execution`, by name."""
Options = TypeVar("Options", bound=LauncherOptions)

if TYPE_CHECKING:
    LauncherName = str
else:
    LauncherName = Literal[tuple(LAUNCHERS)]


class LauncherFields(StrictModel):
    """Field of `execution` that chooses a stage's launcher; `LauncherBlocks` adds the launchers' options."""

    launcher: LauncherName = Field(
        "local",
        description="Program that starts the stage's processes: `local` on this machine, `slurm`, "
        "`kubernetes` or `ray` on a cluster.",
    )

    @property
    def is_local(self) -> bool:
        return LAUNCHERS[self.launcher].IS_LOCAL

    @property
    def options(self) -> LauncherOptions:
        return self.block(LAUNCHERS[self.launcher])

    def block(self, options: type[Options]) -> Options:
        """Return the options that the recipe sets for a given launcher, even if another one is chosen."""
        return next((value for _, value in self if isinstance(value, options)), options())


if TYPE_CHECKING:  # the blocks depend on the registry, which no type checker runs

    class LauncherBlocks(LauncherFields):
        """Fields of `execution` that depend on the launcher: its name, and the options of each launcher."""
else:
    LauncherBlocks = create_model(
        "LauncherBlocks",
        __base__=LauncherFields,
        __module__=__name__,
        **{
            name: (options, Field(options(), description=f"Only with `launcher: {name}`."))
            for name, options in BLOCKS.items()
        },
    )
