"""Options of the launcher `local`, which runs a stage's processes on the machine of the refresh."""

from typing import ClassVar

from stages.core.launchers.launcher import LauncherOptions


class LocalOptions(LauncherOptions):
    """Options of the launcher `local`, which has none."""

    IS_LOCAL: ClassVar[bool] = True
    SPANS_NODES: ClassVar[bool] = False
