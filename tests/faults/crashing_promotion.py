"""A promotion that is killed by SIGKILL within MLflow's client, as a power cut would.

python crashing_promotion.py WORK METHOD NUMBER   right after the call of this number; NUMBER 0: before the first one
"""

import os
import signal
import sys
from pathlib import Path
from typing import Any

from mlflow import MlflowClient

from flows.champion.promotion import promote


def crash_after(method: str, number: int) -> None:
    """Let this process be killed after the call of this number of a method of the client."""
    real = getattr(MlflowClient, method)
    num_calls = 0

    def call(*arguments: Any, **options: Any) -> Any:
        nonlocal num_calls
        if number == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        answer = real(*arguments, **options)
        num_calls += 1
        if num_calls == number:
            os.kill(os.getpid(), signal.SIGKILL)
        return answer

    setattr(MlflowClient, method, call)


if __name__ == "__main__":
    crash_after(sys.argv[2], int(sys.argv[3]))
    sys.exit(promote(Path(sys.argv[1])))
