"""Program that runs another one with the key of named servers: `python -m flows.servers.keyed PROGRAM ARGUMENT…`.

For programs that read their settings when they are loaded, such as the worker and Prefect's own command. `lifecycle`
does the same for itself.
"""

from __future__ import annotations

import os
import sys

from flows.servers.key import named_settings
from stages.core.errors import ServerError


def main() -> None:
    """Become the program, with the key from LIFECYCLE_SERVERS_KEY_FILE in its environment."""
    try:
        environment = {**os.environ, **named_settings()}
    except ServerError as error:
        sys.exit(f"{type(error).__name__}: {error}")
    os.execvpe(sys.argv[1], sys.argv[1:], environment)  # noqa: S606 (no shell)


if __name__ == "__main__":
    main()
