"""Lifecycle home with running servers that test files use one after another; it is emptied in between.

Servers take 13 s of processor time to start, and 7 s with databases that another home has made. Emptied, their
databases are as at that time, and of the rest nothing is left; ports, tokens and processes stay.
"""

import shutil
import sqlite3
from contextlib import closing

from refreshes import ForkedHome, eventually

from flows.servers.programs import QUERY_SECONDS
from tests.databases import DATABASES, NewDatabases

OF_SERVERS = ("prefect", "mlflow", "worker", "servers.json", "servers.key", "servers.lock", "supervisor")


class LentHome(ForkedHome):
    """Lifecycle home that test files share, to start, empty and stop; tests make a `Home` of its folder."""

    def begin(self, new_databases: NewDatabases) -> None:
        self.folder.mkdir()
        new_databases.put_into(self.folder)
        self.environment[QUERY_SECONDS] = "2"  # tests wait for what they ask the worker to start
        self._up()
        self._new = {name: sqlite3.connect(":memory:") for name in DATABASES}
        for name, copy in self._new.items():
            with closing(sqlite3.connect(self.folder / name)) as database:
                database.backup(copy)
            new_databases.keep(name, copy)

    def empty(self) -> None:
        """Wait until no process of the last test file runs, and reset the lifecycle home for the next."""
        eventually(lambda: self.processes() == [])
        self._up()  # borrowers may have stopped what they test
        _remove(path for path in self.folder.parent.iterdir() if path != self.folder)
        _remove(path for path in self.folder.iterdir() if path.name not in OF_SERVERS)
        _remove((self.folder / "mlflow" / "artifacts").glob("*"))
        for name, copy in self._new.items():
            with closing(sqlite3.connect(self.folder / name, timeout=60)) as database:
                copy.backup(database)

    def stop(self) -> None:
        assert self.lifecycle("down").returncode == 0
        assert self.processes() == []

    def _up(self) -> None:
        started = self.lifecycle("up")
        assert started.returncode == 0, started.stderr


def _remove(paths) -> None:
    for path in paths:
        shutil.rmtree(path) if path.is_dir() else path.unlink()
