"""Options of the launcher `slurm` in a recipe (`execution.slurm`)."""

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
"""Options of sbatch that a recipe may not set, because the launcher sets them or they would break it."""


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
    """Options of a stage's Slurm job; those that are not set have the cluster's defaults."""

    partition: str | None = Field(None, description="Slurm partition of the job (`sbatch --partition`).")
    account: str | None = Field(None, description="Slurm account of the job (`sbatch --account`).")
    qos: str | None = Field(None, description="Slurm quality of service of the job (`sbatch --qos`).")
    time_limit: TimeLimit | None = Field(
        None,
        description="Time limit of the Slurm job, as minutes, HH:MM:SS or D-HH:MM:SS; after it the stage continues in "
        "another.",
    )
    warning_s: PositiveInt = Field(
        60,
        description="Number of seconds before the job's time limit at which Slurm asks the stage to end; default 60.",
    )
    options: list[SbatchOption] = Field(
        default_factory=list, description="Further options of sbatch, such as --constraint=h100."
    )
