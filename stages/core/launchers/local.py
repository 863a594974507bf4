"""Options of the launcher `local`, which runs a stage's processes on the machine of the refresh."""

from __future__ import annotations

from typing import ClassVar

from stages.core.launchers.launcher import LauncherOptions


class LocalOptions(LauncherOptions):
    """Local launcher, which has no options of its own."""

    IS_LOCAL: ClassVar[bool] = True
