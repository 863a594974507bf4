"""Program that shows what waits for approval, or makes the decision that comes by its standard input.

    python -m flows.champion.decide

The worker starts it for the people whom a signing-in proxy names (`flows/service/approval_door.py`).
"""

import json
import sys

from flows.champion import approvals, champions
from flows.ledger.home import store_root
from flows.ledger.people import Person
from flows.running.outcome import verdict_sentence
from flows.service.approval_door import Order
from flows.store.store import Store
from stages.core.errors import LifecycleError


def main() -> int:
    """Act on the order, or on an empty one show what waits, as JSON; return an exit code."""
    content = sys.stdin.buffer.read()
    try:
        if not content:
            waiting = approvals.awaited(Store(store_root()).index())
            asked = ((one, one.approval.model_dump(include={"groups", "until_ms"})) for one in waiting)
            print(json.dumps([{"name": one.name, "version": one.version, **shown} for one, shown in asked]))
            return 0
        order = Order.model_validate_json(content)
        person = Person(order.user, order.groups, is_local=False)
        champions.find_mlflow()
        made = order.decision
        print(verdict_sentence(approvals.decide(order.name, made.version, made.decision, person, made.why)))
    except LifecycleError as error:
        print(error)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
