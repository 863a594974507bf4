"""How a training stage runs: nothing of it is identity."""

from __future__ import annotations

from pydantic import Field, PositiveInt

from stages.core.contract import Execution
from stages.core.numbers import Seconds


class TrainExecution(Execution):
    """Where a training stage runs, how often it logs, evaluates and saves."""

    processes: PositiveInt | None = Field(None, description="Processes on each node; default: what the layout needs.")
    log_every_steps: PositiveInt = Field(1, description="Steps between two points of the curves in MLflow.")
    evaluate_every_steps: PositiveInt | None = Field(None, description="Default: only at the end.")
    checkpoint_every_steps: PositiveInt | None = Field(None, description="Default: ten times in a run.")
    checkpoints_kept: PositiveInt = Field(2, description="Older ones are removed.")
    hang_timeout_s: Seconds = Field(
        3600,
        description="A step that takes longer ends the attempt; so does what is saved or evaluated after it, a "
        "micro-batch of the reference, and reading or writing the model. After five steps of packed rows, one that "
        "takes over three times the longest of the last ones (and 30 s) does, too, unless layout.compile is on.",
    )
    ready_timeout_s: Seconds = Field(
        600, description="How long a server that samples completions may take to start, or to come back."
    )
    rollout_timeout_s: Seconds = Field(
        600,
        description="Such a server that answers nothing for so long is ended, and started again, or waited for if "
        "others started it; a teacher's is given up.",
    )
    concurrent_requests: PositiveInt = Field(
        64, description="Prompts, or a teacher's documents, that are asked at a time."
    )
    measure_matmul_rate: bool = Field(True, description="On a CPU, measure the peak that MFU is relative to.")
