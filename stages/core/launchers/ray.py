"""Options of the launcher `ray` in a recipe (`execution.ray`)."""

from typing import ClassVar

from pydantic import Field, PositiveFloat

from stages.core.launchers.launcher import ClusterOptions


class RayOptions(ClusterOptions):
    """Options of a stage's job in a Ray cluster, whose address is in the environment."""

    SPANS_NODES: ClassVar[bool] = False

    resources: dict[str, PositiveFloat] = Field(
        default_factory=dict,
        description="Custom resources of Ray that the job takes of its node, such as {fast_disk: 1}.",
    )
