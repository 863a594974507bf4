"""Base of a launcher's options in a recipe, with the limits that a recipe and a plan are checked against.

Each launcher has a module here, light enough for a config to import. How one that is a cluster starts and follows jobs
is in the module of its name in `flows/launch/`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

from pydantic import Field, PositiveFloat, PositiveInt

from stages.core.fields import StrictModel


class LauncherOptions(StrictModel):
    """Options of a launcher: the block of its name in `execution`; a launcher without options has no block.

    IS_LOCAL: the processes run on the refresh's machine, on one node, and reach what listens on its loopback.
    DESCRIBES_SERVERS: `lifecycle render` reads the block for a serve stage, which another launcher starts.
    """

    IS_LOCAL: ClassVar[bool] = False
    DESCRIBES_SERVERS: ClassVar[bool] = False

    def problems(self) -> Iterator[str]:
        """Yield what a stage lacks to be launched, each beginning with a field of the block."""
        return iter(())

    def gpu_problem(self, wanted: int) -> str | None:
        """Return why a node has fewer GPUs than the stage wants, beginning with a field; None if it has enough."""
        return None


class ClusterOptions(LauncherOptions):
    """Resources that a stage's job asks a cluster for."""

    gpus_per_node: PositiveInt | None = Field(None, description="GPUs on each node.")
    cpus_per_node: PositiveInt | None = Field(
        None, description="CPUs on each node; default: threads × processes of a node."
    )
    memory_gib_per_node: PositiveFloat | None = Field(None, description="Memory on each node.")

    def gpu_problem(self, wanted: int) -> str | None:
        if self.gpus_per_node and self.gpus_per_node < wanted:
            return f"gpus_per_node is {self.gpus_per_node}; raise it, or change its layout"
        return None
