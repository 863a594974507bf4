"""Databases of a lifecycle home whose servers have just started: tests' homes begin with them, instead of making them.

Migrations of Prefect's and MLflow's databases take half of the processor time of a first start.
"""

import os
import shutil
import sqlite3
from pathlib import Path

import pytest

DATABASES = ("prefect/prefect.db", "mlflow/mlflow.db")


class NewDatabases:
    """Copies of the databases of the first home that a test session starts, shared by all workers of pytest-xdist."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def keep(self, name: str, database: sqlite3.Connection) -> None:
        """Keep a copy of a database, unless another home's is kept already."""
        kept = self._folder / name
        if not kept.exists():
            kept.parent.mkdir(parents=True, exist_ok=True)
            written = kept.with_suffix(f".{os.getpid()}")
            database.execute("VACUUM INTO ?", [str(written)])
            written.rename(kept)

    def put_into(self, home: Path) -> None:
        """Copy the databases into a new lifecycle home, if a home was started before."""
        for name in DATABASES:
            if (self._folder / name).exists():
                (home / name).parent.mkdir(mode=0o700)
                shutil.copyfile(self._folder / name, home / name)
                (home / name).chmod(0o600)


@pytest.fixture(scope="session")
def new_databases(tmp_path_factory: pytest.TempPathFactory) -> NewDatabases:
    """Provide the databases with which new lifecycle homes of a test session begin."""
    base = tmp_path_factory.getbasetemp()
    is_of_worker = base.name.startswith("popen-")
    return NewDatabases((base.parent if is_of_worker else base) / "new-databases")
