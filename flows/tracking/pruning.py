"""Deletion of MLflow runs: marks them as deleted, and removes them completely from this lifecycle home's own MLflow.

`mlflow gc` is not used: it would also purge runs that people have deleted and might want back.
"""

import os
from collections.abc import Collection, Iterator
from contextlib import contextmanager

from flows.ledger.home import home
from flows.servers.programs import MLFLOW, MLFLOW_FILE
from flows.store.store import remove_tree
from flows.tracking.shipper import CLIENT_ENVIRONMENT
from stages.core.errors import ServerError


def delete_runs(run_ids: Collection[str], *, purge: bool) -> None:
    """Delete runs that the MLflow at MLFLOW_TRACKING_URI knows; `purge` if it is this home's. Raises ServerError."""
    os.environ.update(CLIENT_ENVIRONMENT)
    from mlflow import MlflowClient
    from mlflow.exceptions import MlflowException

    client = MlflowClient()
    known = []
    try:
        for run_id in run_ids:
            with _unless_unknown():
                # Marks the run only: a person can restore it, until it is purged.
                client.delete_run(run_id)
                known.append(run_id)
        if purge and (home() / MLFLOW.name / MLFLOW_FILE).exists():  # the user may name another database
            _purge(known)
    except MlflowException as error:
        raise ServerError(f"deleting runs from MLflow: {error}; see `lifecycle status`") from error


@contextmanager
def _unless_unknown() -> Iterator[None]:
    from mlflow.exceptions import MlflowException

    try:
        yield
    except MlflowException as error:
        if error.error_code != "RESOURCE_DOES_NOT_EXIST":
            raise


def _purge(run_ids: Collection[str]) -> None:
    """Remove deleted runs completely from this home's MLflow, database and files; SQLite reuses their pages."""
    from mlflow.store.tracking.dbmodels.models import SqlDataset, SqlInput, SqlInputTag
    from mlflow.store.tracking.sqlalchemy_store import SqlAlchemyStore

    folder = home() / MLFLOW.name
    artifacts = folder / "artifacts"
    store = SqlAlchemyStore(f"sqlite:///{folder / MLFLOW_FILE}", str(artifacts))
    for run_id in run_ids:
        # `_hard_delete_run` leaves the datasets that a run has read.
        with store.ManagedSessionMaker(read_only=False) as session:
            inputs = session.query(SqlInput).filter_by(destination_type="RUN", destination_id=run_id)
            read = [(one.input_uuid, one.source_id) for one in inputs]
            session.query(SqlInputTag).filter(SqlInputTag.input_uuid.in_([uuid for uuid, _ in read])).delete()
            inputs.delete()
            # With this run's inputs gone: datasets that other runs have read stay.
            unread = ~session.query(SqlInput).filter(SqlInput.source_id == SqlDataset.dataset_uuid).exists()
            session.query(SqlDataset).filter(SqlDataset.dataset_uuid.in_([uuid for _, uuid in read]), unread).delete()
        with _unless_unknown():
            store._hard_delete_run(run_id)
        # artifacts/EXPERIMENT/RUN
        for files in artifacts.glob(f"*/{run_id}"):
            remove_tree(files)
