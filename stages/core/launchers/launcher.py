"""Base classes for the options of launchers in a recipe, with the checks that a plan of a refresh makes of them.

Each launcher has a module here(light); how a cluster's starts and follows jobs is in `flows/launch/`.
"""

from collections.abc import Iterator
from typing import ClassVar

from pydantic import Field, PositiveFloat, PositiveInt

from stages.core.fields import StrictModel


class LauncherOptions(StrictModel):
    """Options of one launcher, a block in a stage's `execution`; a launcher without options has no block.

    IS_LOCAL: the processes run on the refresh's machine, and reach what listens on its loopback. SPANS_NODES: one job
    can run on several nodes.
    DESCRIBES_SERVERS: `lifecycle render` reads the block for a serve stage, which another launcher starts.
    """

    IS_LOCAL: ClassVar[bool] = False
    SPANS_NODES: ClassVar[bool] = True
    DESCRIBES_SERVERS: ClassVar[bool] = False

    @property
    def shares_home(self) -> bool:
        """Return whether the nodes see the home's disk; else the job's files pass through the shared store."""
        return True

    def problems(self, nodes: int) -> Iterator[str]:
        """Yield an error, which begins with the option's name, for each option missing or unfit for so many nodes."""
        return iter(())

    def gpu_problem(self, wanted: int) -> str | None:
        """Return an error, which begins with an option's name, if a node has too few GPUs for the stage; else None."""
        return None


class ClusterOptions(LauncherOptions):
    """Resources that a stage's job requests from a cluster."""

    gpus_per_node: PositiveInt | None = Field(None, description="Number of GPUs requested on each node.")
    cpus_per_node: PositiveInt | None = Field(
        None, description="Number of CPUs requested on each node; default: threads × processes on a node."
    )
    memory_gib_per_node: PositiveFloat | None = Field(
        None, description="Memory requested on each node, in GiB; default: the cluster's."
    )

    def gpu_problem(self, wanted: int) -> str | None:
        if self.gpus_per_node and self.gpus_per_node < wanted:
            return f"gpus_per_node is {self.gpus_per_node}; raise it, or change its layout"
        return None
