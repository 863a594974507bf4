"""Protection against copied lifecycle homes: the copy's Prefect pauses its schedules and cancels its copied refreshes.

Otherwise both homes would refresh, promote and publish. Prefect is asked by HTTP, since importing its client fixes
which server it talks to.
"""

from collections.abc import Mapping
from typing import Any

from flows.servers.keyed import USER
from stages.core.errors import ServerError
from stages.remote.http import Answer, AnswerModel, Expected, ask_httpx, httpx_client

PAGE = 100
PAGE_BYTES = 2**26
TIMEOUT_S = 60.0
"""Timeout of a request to Prefect, in seconds."""
UNFINISHED = ("SCHEDULED", "PENDING", "RUNNING", "PAUSED", "CANCELLING")
CANCELLED = {"type": "CANCELLED", "message": "it belongs to the home of which this one is a copy"}


class _Deployment(AnswerModel):
    id: str
    name: str
    paused: bool
    schedules: list[dict[str, Any]]


class _FlowRun(AnswerModel):
    id: str


def stop_copied_runs(api_url: str, password: str) -> list[str]:
    """Pause schedules, cancel runs, before a worker starts; return the paused names. Raises ServerError if refused."""
    import httpx

    expected = Expected(f"pausing the schedules of a copied home: Prefect at {api_url}", PAGE_BYTES, TIMEOUT_S)
    unfinished = {"limit": PAGE, "flow_runs": {"state": {"type": {"any_": UNFINISHED}}}}
    paused: list[str] = []
    try:
        with httpx_client(auth=(USER, password), timeout=TIMEOUT_S) as client:

            def ask(path: str, body: Mapping[str, Any]) -> Answer:
                return ask_httpx(client, expected, "POST", f"{api_url}/{path}", json=body).check()

            offset = 0
            while page := ask("deployments/filter", {"limit": PAGE, "offset": offset}).parsed(list[_Deployment]):
                # Pausing changes neither the number nor the order of deployments.
                offset += PAGE
                for deployment in page:
                    if deployment.schedules and not deployment.paused:
                        ask(f"deployments/{deployment.id}/pause_deployment", {})
                        paused.append(deployment.name)
            # Without an offset: each cancelled run leaves the filter, so the next page is the first again.
            while runs := ask("flow_runs/filter", unfinished).parsed(list[_FlowRun]):
                for run in runs:
                    ask(f"flow_runs/{run.id}/set_state", {"state": CANCELLED, "force": True})
    except (httpx.HTTPError, TimeoutError) as error:
        raise ServerError(f"{expected.server} does not answer: {error!r}; run the command again") from error
    return sorted(paused)
