"""Warning that recipes are scheduled but no worker runs."""

from __future__ import annotations

import sqlite3
from contextlib import closing

from flows.ledger.home import home
from flows.servers.programs import PREFECT, WORKER
from flows.servers.records import host_of, read_records

ACTIVE = """
    SELECT COUNT(DISTINCT deployment.id) FROM deployment
    JOIN deployment_schedule ON deployment_schedule.deployment_id = deployment.id
    WHERE deployment_schedule.active AND NOT deployment.paused
"""


def missing_worker() -> str | None:
    """Return the warning when recipes are scheduled here and no worker runs; None otherwise.

    Prefect need not run: its database of this home is read. If the user names a Prefect, its workers are elsewhere.
    """
    records = read_records()
    prefect, worker = records.get(PREFECT.name), records.get(WORKER.name)
    # A command that has started the servers has set the variable to ours.
    if PREFECT.named() not in (None, prefect and prefect.address + PREFECT.client_path):
        return None
    if worker and (worker.process.alive() or host_of(worker)):
        return None
    try:
        address = f"{(home() / PREFECT.name / 'prefect.db').as_uri()}?mode=ro"
        with closing(sqlite3.connect(address, uri=True, timeout=1.0)) as database:
            (count,) = database.execute(ACTIVE).fetchone()
    except sqlite3.Error:  # there is no database yet, or Prefect uses another one
        count = 0
    return f"no worker runs, so scheduled recipes ({count}) are not refreshed: `lifecycle up`" if count else None
