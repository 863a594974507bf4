"""Launcher of an agent program: `python -m stages.rollouts.environments.agent_program LIMITS WORD…`.

LIMITS is JSON: `memory_bytes` (address space of each process), `port` (of the gateway), `readable` (paths),
`own_servers`. The process confines itself, and becomes the program. It writes to its home folder alone, and reads the
installation of its command, the system's files and the paths. Of the network it reaches one port, by TCP; with
`own_servers` also the system's free ports, on one of which it may listen. It sees no other process's environment, and
from Linux 6.12 on signals none. Landlock's rule of ports needs Linux 6.7: before, files and ports are as they were.
"""

import contextlib
import json
import os
import resource
import shutil
import sys
from pathlib import Path

from stages.core.program_loop import end_with_asking_process
from stages.rewards import code_program

FILE_BYTES = 64 << 20
NUM_OPEN_FILES = 256
READABLE = tuple(Path(path) for path in ("/bin", "/sbin", "/etc", "/proc", "/sys", "/opt", "/dev"))


def main(limits: str, *words: str) -> None:
    """Confine this process, and run the program in it; exit with code 127 if there is no such program."""
    end_with_asking_process()
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    executable = shutil.which(words[0], path=environment["PATH"])
    if executable is None:
        sys.exit(f"there is no program {words[0]!r}")
    asked = json.loads(limits)
    # a virtual environment, and the installation that it is of
    installed = [path.parents[1] for path in (Path(executable), Path(executable).resolve()) if len(path.parents) > 2]
    readable = [*code_program.READABLE, *READABLE, *installed, *map(Path, asked["readable"])]
    writable = [Path(environment["HOME"]), *(Path("/dev") / name for name in ("null", "tty"))]
    for limit, value in (
        (resource.RLIMIT_AS, asked["memory_bytes"]),
        (resource.RLIMIT_FSIZE, FILE_BYTES),
        (resource.RLIMIT_NOFILE, NUM_OPEN_FILES),
        (resource.RLIMIT_CORE, 0),
    ):
        resource.setrlimit(limit, (value, value))
    with contextlib.suppress(OSError):  # without Landlock, which the stage warns of
        code_program.hide_other_processes()
    if code_program.landlock_version() >= code_program.NETWORK_VERSION:
        ports = code_program.ports_of_own_servers() if asked["own_servers"] else {}
        code_program.restrict_files(readable, writable, {**ports, asked["port"]: code_program.CONNECT})
    with contextlib.suppress(OSError):  # without libseccomp; Landlock has restricted TCP
        code_program.permit_tcp_only()
    os.execve(executable, [words[0], *words[1:]], environment)  # noqa: S606 - the recipe's program


if __name__ == "__main__":
    main(*sys.argv[1:])
