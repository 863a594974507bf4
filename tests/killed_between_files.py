"""Train stage that is killed when it begins to write its adapter's config, for tests of resuming."""

import os
import signal
from pathlib import Path

from stages.adapters import files
from tests.forked_stages import main as run_stage

write = files.write_atomically


def write_or_die(path: Path, content: str) -> None:
    if path.name == files.CONFIG_FILE:
        os.kill(os.getpid(), signal.SIGKILL)
    write(path, content)


def main() -> None:
    files.write_atomically = write_or_die
    run_stage()
