"""Program that prints the artifact behind a model alias: `python -m flows.champion.key models:/NAME@ALIAS`."""

import json
import os
import sys
from typing import Any

import httpx

from flows.champion import champions
from flows.champion.registrations import TAG
from flows.champion.registry import ABSENT, CHAMPION, PREVIOUS
from stages.core.errors import LifecycleError, ServerError
from stages.remote.http import Expected, ask_httpx, httpx_client

ALIAS_ROUTE = "/api/2.0/mlflow/registered-models/alias"
"""Path of the REST endpoint that returns the model version behind an alias in MLflow."""
TIMEOUT_S = 10
ANSWER_BYTES = 2**20


def main(uri: str) -> int:
    """Print the artifact behind a model alias as {"model": "KIND/VERSION"}; return the exit code."""
    try:
        champions.find_mlflow()
        name, alias = champions.parse(uri)
        model = _asked(name, alias) or champions.find(champions.connect(), name, alias).registration.model
    except LifecycleError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    print(json.dumps({"model": model}))
    return 0


def _asked(name: str, alias: str) -> str | None:
    """Return the artifact behind an alias from MLflow's REST API; None for anything unusual.

    MLflow's Python client takes two seconds to import, as long as a plan may take. Only for the unusual, such as a move
    that was cut short, is it used: it repairs or reports. Raises StoreError when there is no such model or alias.
    """
    address = os.environ["MLFLOW_TRACKING_URI"].rstrip("/") + ALIAS_ROUTE
    user, password = (os.environ.get(f"MLFLOW_TRACKING_{part}", "") for part in ("USERNAME", "PASSWORD"))
    expected = Expected("MLflow", ANSWER_BYTES, TIMEOUT_S)
    try:
        with httpx_client(auth=(user, password) if user else None, timeout=TIMEOUT_S) as client:
            answer = ask_httpx(client, expected, "GET", address, params={"name": name, "alias": alias})
        reply = expected.parsed(answer.body, dict[str, Any])
        if reply.get("error_code") in ABSENT:
            raise champions.not_found_error(name, alias)
        version = reply["model_version"]
        tags = {tag["key"]: tag["value"] for tag in version.get("tags", ())}
        return None if {CHAMPION, PREVIOUS} <= {*version["aliases"]} else tags.get(f"{TAG}model")
    except (httpx.HTTPError, httpx.InvalidURL, OSError, ServerError, LookupError, TypeError, AttributeError):
        return None


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
