"""Prefect deployments of the refresh flow, and flow runs that a command creates and runs in its own process."""

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any
from uuid import UUID

import httpx
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.actions import DeploymentUpdate, WorkPoolCreate
from prefect.client.schemas.filters import (
    ArtifactFilter,
    ArtifactFilterFlowRunId,
    DeploymentFilter,
    DeploymentFilterName,
    FlowFilter,
    FlowFilterName,
    FlowRunFilter,
    FlowRunFilterId,
)
from prefect.client.schemas.objects import FlowRun
from prefect.client.schemas.responses import DeploymentResponse
from prefect.exceptions import ObjectAlreadyExists, ObjectNotFound
from prefect.settings import PREFECT_API_DEFAULT_LIMIT
from prefect.states import Pending
from prefect.utilities.callables import parameter_schema
from prefect.utilities.processutils import command_to_string

from flows.ledger.record import RefreshRecord
from flows.running.refresh import final_state, refresh
from flows.running.request import RefreshRequest
from stages.core.errors import ServerError

WORK_POOL = "lifecycle"
BY_HAND = "by hand"
"""Deployment for refreshes by hand (Prefect retries only deployments' runs), whose name no recipe can have."""


ENTRYPOINT = f"{refresh.fn.__module__}.{refresh.fn.__name__}"
"""Python path (module.function) by which a Prefect worker imports the refresh flow."""


@contextmanager
def prefect_client() -> Iterator[SyncPrefectClient]:
    """Open a client of the Prefect server; its failures are raised as ServerError."""
    try:
        with get_client(sync_client=True) as client:
            yield client
    except httpx.HTTPError as error:
        raise ServerError(f"asking Prefect: {type(error).__name__}: {error}; look at `lifecycle status`") from error


def delete_flow_runs(flow_run_ids: Sequence[str]) -> None:
    """Delete known flow runs with their task runs, states, logs and artifacts. Raises `ServerError`.

    Their events stay; Prefect deletes events when they are a week old.
    """
    with prefect_client() as client:
        for flow_run_id in _known(client, [*map(UUID, flow_run_ids)]):
            # Prefect deletes all else with the flow run, or soon after it.
            of_flow_run = ArtifactFilter(flow_run_id=ArtifactFilterFlowRunId(any_=[flow_run_id]))
            for artifact in client.read_artifacts(artifact_filter=of_flow_run):
                with suppress(ObjectNotFound):
                    client.delete_artifact(artifact.id)
            with suppress(ObjectNotFound):
                client.delete_flow_run(flow_run_id)


def _known(client: SyncPrefectClient, flow_run_ids: Sequence[UUID]) -> Iterator[UUID]:
    """Yield those of the flow runs that Prefect knows, asking in batches of Prefect's page size."""
    at_once = PREFECT_API_DEFAULT_LIMIT.value()
    for start in range(0, len(flow_run_ids), at_once):
        asked = FlowRunFilter(id=FlowRunFilterId(any_=[*flow_run_ids[start : start + at_once]]))
        yield from (flow_run.id for flow_run in client.read_flow_runs(flow_run_filter=asked))


def deploy(client: SyncPrefectClient, name: str, **options: Any) -> UUID:
    """Create a Prefect deployment of the refresh flow, or replace the one with this name."""
    with suppress(ObjectAlreadyExists):
        client.create_work_pool(WorkPoolCreate(name=WORK_POOL, type="process"))
    return client.create_deployment(
        flow_id=client.create_flow(refresh),
        name=name,
        work_pool_name=WORK_POOL,
        entrypoint=ENTRYPOINT,
        parameter_openapi_schema=parameter_schema(refresh).model_dump(),
        enforce_parameter_schema=True,
        # With a command of its own, a worker starts the flow at once instead of preparing a workspace for it. Output of
        # the flow reaches Prefect's logs; a pipe to the worker would break, and end the flow, when the worker dies.
        job_variables={
            "command": command_to_string([sys.executable, "-m", "prefect.engine"]),
            "stream_output": False,
        },
        description=refresh.description,
        **options,
    )


def find_deployment(client: SyncPrefectClient, name: str) -> DeploymentResponse | None:
    """Return the refresh flow's deployment by name, with a filter: Prefect's client refuses slashes in an address."""
    found = client.read_deployments(
        flow_filter=FlowFilter(name=FlowFilterName(any_=[refresh.name])),
        deployment_filter=DeploymentFilter(name=DeploymentFilterName(any_=[name])),
    )
    return found[0] if found else None


def update_entrypoints() -> None:
    """Update Prefect deployments made by earlier versions to the flow's present Python path. Raises ServerError."""
    with prefect_client() as client:
        for found in client.read_deployments(flow_filter=FlowFilter(name=FlowFilterName(any_=[refresh.name]))):
            if found.work_pool_name == WORK_POOL and found.entrypoint != ENTRYPOINT:
                client.update_deployment(found.id, DeploymentUpdate(entrypoint=ENTRYPOINT))


def create_flow_run(request: RefreshRequest, name: str) -> FlowRun:
    """Create a Prefect flow run for a refresh that this process runs itself; Prefect's Retry button works on it."""
    parameters = {
        "recipe": request.recipe,
        "overrides": list(request.overrides),
        "until": request.until,
        "force": list(request.force),
    }
    with prefect_client() as client:
        known = find_deployment(client, BY_HAND)
        deployment = known.id if known and known.entrypoint == ENTRYPOINT else deploy(client, BY_HAND)
        return client.create_flow_run_from_deployment(deployment, parameters=parameters, state=Pending(), name=name)


def settle_flow_runs(records: Sequence[RefreshRecord]) -> None:
    """Give flow runs that ended waiting for approval the state in which the decision has left their refreshes.

    Prefect's server emits the events of these states itself, so that notifications go out. Raises `ServerError`.
    """
    with prefect_client() as client:
        for record in records:
            if record.prefect_flow_run_id:
                with suppress(ObjectNotFound):
                    client.set_flow_run_state(UUID(record.prefect_flow_run_id), final_state(record), force=True)


def reset_flow_run(record: RefreshRecord) -> FlowRun | None:
    """Reset the Prefect flow run of a refresh that this process will retry, and return it; None if Prefect lacks it."""
    if record.prefect_flow_run_id is None:
        return None
    with prefect_client() as client, suppress(ObjectNotFound):
        # Forced, because Prefect restarts runs only from `Scheduled`, in which a worker could take it first.
        client.set_flow_run_state(UUID(record.prefect_flow_run_id), Pending(), force=True)
        return client.read_flow_run(UUID(record.prefect_flow_run_id))
    return None
