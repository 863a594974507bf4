"""Run a stage that is killed before its adapter's config is written: `python -m tests.killed_between_files WORK`."""

import os
import signal
from pathlib import Path

from stages.__main__ import main
from stages.adapters import files

write = files.write_atomically


def write_or_die(path: Path, content: str) -> None:
    if path.name == files.CONFIG_FILE:
        os.kill(os.getpid(), signal.SIGKILL)
    write(path, content)


files.write_atomically = write_or_die
main()
