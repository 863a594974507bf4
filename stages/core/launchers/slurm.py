"""Launcher `slurm`: the block `execution.slurm`, with the options of sbatch that a recipe may give."""

from __future__ import annotations

import re
from typing import Annotated

from pydantic import AfterValidator, Field, PositiveInt

from stages.core.launchers.launcher import ClusterOptions

OURS = frozenset(
    {
        *("array", "chdir", "comment", "error", "export", "export-file", "input", "job-name", "nodes", "no-requeue"),
        *("ntasks", "ntasks-per-node", "open-mode", "output", "parsable", "requeue", "signal", "test-only", "wait"),
        "wrap",
    }
)
"""Options of sbatch that a recipe may not set: the launcher sets them itself, or they would break it."""


def _check_option(option: str) -> str:
    name = re.fullmatch(r"--([a-z][a-z0-9-]*)(=.*)?", option)
    if not name:
        raise ValueError(f"{option!r} is no option of sbatch in the form --name or --name=value")
    if name[1] in OURS:
        raise ValueError(f"--{name[1]} is set by the launcher; remove it")
    return option


SbatchOption = Annotated[str, AfterValidator(_check_option)]
TimeLimit = Annotated[str, Field(pattern=r"^(\d+|\d+:\d\d|(\d+-)?\d+:\d\d:\d\d|\d+-\d+(:\d\d)?)$")]


class SlurmOptions(ClusterOptions):
    """Resources of a stage's Slurm job; unset options have the cluster's defaults."""

    partition: str | None = Field(None, description="Slurm partition, as `sbatch --partition`.")
    account: str | None = Field(None, description="Slurm account, as `sbatch --account`.")
    qos: str | None = Field(None, description="As `sbatch --qos`.")
    time_limit: TimeLimit | None = Field(
        None,
        description="Time limit of the Slurm job: minutes, HH:MM:SS or "
        "D-HH:MM:SS. A job that reaches it continues in another.",
    )
    warning_s: PositiveInt = Field(
        60, description="Seconds before its time limit at which a Slurm job is asked to end."
    )
    options: list[SbatchOption] = Field(
        default_factory=list, description="Further options of sbatch, as in --constraint=h100."
    )
