"""Key of this home's servers: with it, programs may use Prefect and MLflow. Only its owner may read the file.

Also the key of servers elsewhere that the user names; then the user names its file, too (`KEY_FILE_VARIABLE`). For
programs that read their settings when they are loaded, such as the worker and Prefect's own command, this module is a
program that runs another one with that key: `python -m flows.servers.keyed PROGRAM ARGUMENT…`. `lifecycle` does the
same for itself.
"""

from __future__ import annotations

import os
import secrets
import sys
from pathlib import Path
from typing import TextIO

from flows.ledger.home import home
from flows.servers.programs import NAMED_BY
from stages.core.errors import ServerError

USER = "lifecycle"
KEY_FILE_VARIABLE = "LIFECYCLE_SERVERS_KEY_FILE"
"""Variable that names the file with the key of PREFECT_API_URL's and MLFLOW_TRACKING_URI's servers."""
READABLE_BY_OTHERS = 0o077
_REMAKE = "remove it, and `lifecycle up` makes a new one and restarts the servers with it"
_CORRECT = f"it must hold {USER}:PASSWORD, readable by you alone (mode 0600)"


def key_file() -> Path:
    """Return the path of the key, which the file holds as `USER:PASSWORD`."""
    return home() / "servers.key"


def read_key() -> str | None:
    """Return the key's password; None before the first `up`. Raises `ServerError` when others could have read it."""
    try:
        return _read(key_file(), "the local servers", _REMAKE)
    except (FileNotFoundError, NotADirectoryError):
        return None


def read_named_key() -> str | None:
    """Return the password of the key in the file that the user names, or None. Raises `ServerError`."""
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
    """Return the key's password; make a key if there is none. Call it under the lock of the servers."""
    password = read_key()
    if password is None:
        password = secrets.token_urlsafe(32)
        with open_private(key_file()) as stream:
            stream.write(f"{USER}:{password}\n")
    return password


def client_settings(server: str, password: str) -> dict[str, str]:
    """Return the variables by which the clients of a server send the key."""
    if server == "prefect":
        return {"PREFECT_API_AUTH_STRING": f"{USER}:{password}"}
    return {"MLFLOW_TRACKING_USERNAME": USER, "MLFLOW_TRACKING_PASSWORD": password}


def named_settings() -> dict[str, str]:
    """Return the variables by which clients of named servers send their key, where its file is named.

    Variables that are set already are left out. Raises `ServerError` when the file cannot be used.
    """
    named = [name for name, variable in NAMED_BY.items() if os.environ.get(variable)]
    password = read_named_key() if named else None
    if password is None:
        return {}
    settings = {key: value for name in named for key, value in client_settings(name, password).items()}
    return {name: value for name, value in settings.items() if not os.environ.get(name)}


def open_private(path: Path) -> TextIO:
    """Create a text file that only its owner can read from the start, whatever the umask."""
    return open(path, "x", encoding="ascii", opener=lambda name, flags: os.open(name, flags, 0o600))


def main() -> None:
    """Become the program, with the key from LIFECYCLE_SERVERS_KEY_FILE in its environment."""
    try:
        environment = {**os.environ, **named_settings()}
    except ServerError as error:
        sys.exit(f"{type(error).__name__}: {error}")
    os.execvpe(sys.argv[1], sys.argv[1:], environment)  # noqa: S606 (no shell)


if __name__ == "__main__":
    main()
