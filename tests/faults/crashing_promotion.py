"""Stand-in for the promotion program that is killed, or loses MLflow, at a moment that a test chooses.

It replaces `flows.champion.promotion`. PROMOTION_FAULT says how: `METHOD NUMBER` kills it, as a power cut would, right
after the call of this number of a method of MLflow's client (0: before the first one); `away` takes MLflow from it;
`judge` kills it before the verdict; unset, nothing is disturbed.

python crashing_promotion.py MARK   promotes a candidate; this process dies between the commit and the hook
"""

import os
import signal
import sys
from typing import Any, NoReturn

from mlflow import MlflowClient

from flows.champion import promotion
from flows.launch import hook
from flows.ledger.home import store_root
from flows.store.store import Store
from tests.promotion import promote

NOWHERE = "http://127.0.0.1:9"


def die(*_: Any) -> NoReturn:
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError("killed")


def crash_after(method: str, number: int) -> None:
    """Kill this process right after the given number of calls of an MLflow client's method (0: before the first)."""
    real = getattr(MlflowClient, method)
    num_calls = 0

    def call(*arguments: Any, **options: Any) -> Any:
        nonlocal num_calls
        if number == 0:
            die()
        answer = real(*arguments, **options)
        num_calls += 1
        if num_calls == number:
            die()
        return answer

    setattr(MlflowClient, method, call)


def main() -> None:
    fault, _, number = os.environ.get("PROMOTION_FAULT", "").partition(" ")
    if len(sys.argv) == 2:
        hook.complete = die
        promote(Store(store_root()), sys.argv[1], [1.0] * 100, max_regression_standard_errors=None)
    elif sys.argv[1] == "complete" and fault == "away":
        os.environ["MLFLOW_TRACKING_URI"] = NOWHERE
    elif fault == "judge":
        die()
    elif sys.argv[1] == "complete" and fault:
        crash_after(fault, int(number))
    promotion.main()


if __name__ == "__main__":
    main()
