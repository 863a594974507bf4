"""`python -m flows.champion.key models:/NAME@ALIAS`: prints which artifact of the store the alias points to."""

from __future__ import annotations

import json
import sys

from flows.champion import champions
from stages.core.errors import LifecycleError


def main(uri: str) -> int:
    """Prints {"model": "KIND/VERSION"}; returns the exit code of the error class."""
    try:
        version = champions.find(champions.connect(), *champions.parse(uri))
    except LifecycleError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    print(json.dumps({"model": version.registration.model}))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
