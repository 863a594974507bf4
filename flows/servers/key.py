"""The key of this home's servers: with it, anybody may ask Prefect and MLflow. A file that only its owner may read."""

from __future__ import annotations

import os
import secrets
from pathlib import Path
from typing import TextIO

from flows.ledger.home import home
from stages.core.errors import ServerError

USER = "lifecycle"
_REMEDY = "remove it, and `lifecycle up` makes a new one and restarts the servers with it"
READABLE_BY_OTHERS = 0o077


def key_file() -> Path:
    """Where the key is, as `USER:PASSWORD`."""
    return home() / "servers.key"


def read_key() -> str | None:
    """The key's password; None before the first `up`. Raises `ServerError` when others could have read it."""
    path = key_file()
    try:
        with path.open(encoding="ascii") as stream:
            mode = os.fstat(stream.fileno()).st_mode
            text = stream.read().strip()
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError) as error:
        raise ServerError(f"reading the key of the local servers, {path}: {error}; {_REMEDY}") from error
    if mode & READABLE_BY_OTHERS:
        raise ServerError(f"reading the key of the local servers: {path} could be read by others; {_REMEDY}")
    user, _, password = text.partition(":")
    if user != USER or not password:
        raise ServerError(f"reading the key of the local servers: {path} does not hold {USER}:…; {_REMEDY}")
    return password


def make_key() -> str:
    """The key's password; a new one if there is none. To be called under the lock of the servers."""
    password = read_key()
    if password is None:
        password = secrets.token_urlsafe(32)
        with open_private(key_file()) as stream:
            stream.write(f"{USER}:{password}\n")
    return password


def client_settings(server: str, password: str) -> dict[str, str]:
    """What the clients of a local server need in their environment to show the key."""
    if server == "prefect":
        return {"PREFECT_API_AUTH_STRING": f"{USER}:{password}"}
    return {"MLFLOW_TRACKING_USERNAME": USER, "MLFLOW_TRACKING_PASSWORD": password}


def open_private(path: Path) -> TextIO:
    """A new text file that was never anybody else's to read, whatever the umask."""
    return open(path, "x", encoding="ascii", opener=lambda name, flags: os.open(name, flags, 0o600))
