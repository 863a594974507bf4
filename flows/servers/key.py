"""The key of this home's servers: with it, anybody may ask Prefect and MLflow. A file that only its owner may read.

Of servers elsewhere, which the user names, too: there, the user names the file (`KEY_FILE_VARIABLE`).
"""

from __future__ import annotations

import os
import secrets
from pathlib import Path
from typing import TextIO

from flows.ledger.home import home
from flows.servers.programs import NAMED_BY
from stages.core.errors import ServerError

USER = "lifecycle"
KEY_FILE_VARIABLE = "LIFECYCLE_SERVERS_KEY_FILE"
"""Where a user names the file that holds the key of the servers of PREFECT_API_URL and MLFLOW_TRACKING_URI."""
READABLE_BY_OTHERS = 0o077
_REMAKE = "remove it, and `lifecycle up` makes a new one and restarts the servers with it"
_CORRECT = f"it is to hold {USER}:PASSWORD, for nobody but you to read (mode 0600)"


def key_file() -> Path:
    """Where the key is, as `USER:PASSWORD`."""
    return home() / "servers.key"


def read_key() -> str | None:
    """The key's password; None before the first `up`. Raises `ServerError` when others could have read it."""
    try:
        return _read(key_file(), "the local servers", _REMAKE)
    except (FileNotFoundError, NotADirectoryError):
        return None


def read_named_key() -> str | None:
    """Password of the key in the file that the user names; None when none is. Raises `ServerError`."""
    named = os.environ.get(KEY_FILE_VARIABLE)
    if not named:
        return None
    try:
        return _read(Path(named), f"the servers ({KEY_FILE_VARIABLE})", _CORRECT)
    except (FileNotFoundError, NotADirectoryError) as error:
        raise ServerError(f"reading the key that {KEY_FILE_VARIABLE} names: there is no {named}; {_CORRECT}") from error


def _read(path: Path, of: str, remedy: str) -> str:
    try:
        with path.open(encoding="ascii") as stream:
            mode = os.fstat(stream.fileno()).st_mode
            text = stream.read().strip()
    except (FileNotFoundError, NotADirectoryError):
        raise
    except (OSError, ValueError) as error:
        raise ServerError(f"reading the key of {of}, {path}: {error}; {remedy}") from error
    if mode & READABLE_BY_OTHERS:
        raise ServerError(f"reading the key of {of}: {path} could be read by others; {remedy}")
    user, _, password = text.partition(":")
    if user != USER or not password:
        raise ServerError(f"reading the key of {of}: {path} does not hold {USER}:…; {remedy}")
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
    """What the clients of a server need in their environment to show the key."""
    if server == "prefect":
        return {"PREFECT_API_AUTH_STRING": f"{USER}:{password}"}
    return {"MLFLOW_TRACKING_USERNAME": USER, "MLFLOW_TRACKING_PASSWORD": password}


def named_settings() -> dict[str, str]:
    """What the clients of servers that the user names need to show their key, where a file of it is named.

    A setting that is there already stays. Raises `ServerError` when the file cannot be used.
    """
    named = [name for name, variable in NAMED_BY.items() if os.environ.get(variable)]
    password = read_named_key() if named else None
    if password is None:
        return {}
    settings = {key: value for name in named for key, value in client_settings(name, password).items()}
    return {name: value for name, value in settings.items() if not os.environ.get(name)}


def open_private(path: Path) -> TextIO:
    """A new text file that was never anybody else's to read, whatever the umask."""
    return open(path, "x", encoding="ascii", opener=lambda name, flags: os.open(name, flags, 0o600))
