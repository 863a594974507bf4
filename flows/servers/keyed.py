"""Key for access to the local Prefect and MLflow servers, in a file that only its owner can read.

Also the key of servers elsewhere that the user names, with its file (`KEY_FILE_VARIABLE`). Programs that read their
settings when they are loaded, such as the worker and Prefect's own command, are run with that key:

python -m flows.servers.keyed PROGRAM ARGUMENT…
"""

import os
import secrets
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TextIO

from flows.ledger.home import home
from flows.servers.programs import NAMED_BY
from stages.core.errors import ServerError

USER = "lifecycle"
KEY_FILE_VARIABLE = "LIFECYCLE_SERVERS_KEY_FILE"
"""Environment variable for the path of the key file of servers that the user runs elsewhere."""
READABLE_BY_OTHERS = 0o077
_REMAKE = "remove it, and `lifecycle up` makes a new one and restarts the servers with it"
_CORRECT = f"it must hold {USER}:PASSWORD, readable by you alone (mode 0600)"


def key_file() -> Path:
    """Return the path of the local servers' key file, whose content is `USER:PASSWORD`."""
    return home() / "servers.key"


def read_key() -> str | None:
    """Return the local servers' password; None before `lifecycle up`. Raises ServerError if others could read it."""
    try:
        return _read(key_file(), "the local servers", _REMAKE)
    except (FileNotFoundError, NotADirectoryError):
        return None


def read_named_key(variable: str = KEY_FILE_VARIABLE) -> str | None:
    """Return the password in the key file that a variable names, or None. Raises `ServerError` for a bad file."""
    named = os.environ.get(variable)
    if not named:
        return None
    try:
        return _read(Path(named), f"the servers ({variable})", _CORRECT)
    except (FileNotFoundError, NotADirectoryError) as error:
        raise ServerError(f"reading the key that {variable} names: there is no {named}; {_CORRECT}") from error


def _read(path: Path, of: str, remedy: str) -> str:
    try:
        with path.open(encoding="ascii") as stream:
            # Of the file that was opened, which another one may have replaced since.
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
    """Return the local servers' password, from a new file if there is none. Call it under the servers' lock."""
    password = read_key()
    if password is None:
        password = secrets.token_urlsafe(32)
        with open_private(key_file()) as stream:
            stream.write(f"{USER}:{password}\n")
    return password


def client_settings(server: str, password: str) -> dict[str, str]:
    """Return the environment variables with which a client of Prefect or MLflow sends the password."""
    if server == "prefect":
        return {"PREFECT_API_AUTH_STRING": f"{USER}:{password}"}
    return {"MLFLOW_TRACKING_USERNAME": USER, "MLFLOW_TRACKING_PASSWORD": password}


def set_variables(variables: Mapping[str, str]) -> None:
    """Set environment variables of clients; Prefect, if it is imported already, reads its settings again."""
    os.environ |= variables
    if context := sys.modules.get("prefect.context"):
        context.refresh_global_settings_context()


def named_settings() -> dict[str, str]:
    """Return unset client variables for the user's servers, if their key file is named; ServerError if unusable."""
    named = [name for name, variable in NAMED_BY.items() if os.environ.get(variable)]
    password = read_named_key() if named else None
    if password is None:
        return {}
    settings = {key: value for name in named for key, value in client_settings(name, password).items()}
    return {name: value for name, value in settings.items() if not os.environ.get(name)}


def open_private(path: Path) -> TextIO:
    """Create a text file that only its owner can read, whatever the umask."""
    # "x": a file or link that another user has put there is not written to.
    return open(path, "x", encoding="ascii", opener=lambda name, flags: os.open(name, flags, 0o600))


def main() -> None:
    """Exec another program with the key of the user's own Prefect and MLflow servers in its environment."""
    try:
        environment = {**os.environ, **named_settings()}
    except ServerError as error:
        sys.exit(f"{type(error).__name__}: {error}")
    # An exec, so that signals and the exit code are the program's own.
    os.execvpe(sys.argv[1], sys.argv[1:], environment)  # noqa: S606 (no shell)


if __name__ == "__main__":
    main()
