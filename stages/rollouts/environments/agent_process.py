"""Process of an agent program: started with a question, watched, and ended with all that it started."""

import contextlib
import json
import os
import select
import subprocess
import sys
import tempfile
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stages.core.process_tree import TOKEN_VARIABLE
from stages.core.program import GRACE_S, bare_environment, end_program
from stages.core.program_loop import LIFELINE

KEPT_BYTES = 64 << 10
"""Number of the last bytes of each output stream that are kept."""
MOST_PRINTED_BYTES = 64 << 20
PIECE_BYTES = 1 << 16
LAUNCHER = "stages.rollouts.environments.agent_program"


@dataclass(frozen=True)
class Ended:
    """End of a program. exit_code: negative for a signal. printed, complaint: the last of its standard streams."""

    exit_code: int
    printed: str
    complaint: str


@dataclass(frozen=True)
class AgentCommand:
    """Command of a program. words: of its command line. folder: where it runs. homes: folder of its home folders.

    limits: as of the launcher.
    """

    words: Sequence[str]
    folder: Path
    homes: Path
    limits: Mapping[str, Any]


class AgentProcess:
    """Running program, which ends with this process, however that ends."""

    def __init__(
        self,
        command: AgentCommand,
        port: int,
        variables: Mapping[str, str],
        question: Any,
        on_end: Callable[[Ended], None],
    ) -> None:
        """Start the program, with a question in JSON as its standard input, and a port that it may connect to.

        on_end: called in a thread, at its end.
        """
        home = tempfile.TemporaryDirectory(dir=command.homes, ignore_cleanup_errors=True)
        token = os.urandom(16).hex()
        # What the program starts in sessions of its own bears the stage's token, too, for those that end a dead stage.
        tokens = ":".join(filter(None, [os.environ.get(TOKEN_VARIABLE), token]))
        environment = bare_environment(Path(home.name))
        path = os.pathsep.join([str(Path(sys.executable).parent), environment.get("PATH", os.defpath)])
        own = {TOKEN_VARIABLE: tokens, "PATH": path, **variables}
        # Only this process holds the writing end: its end closes the pipe, and the program is killed.
        lifeline, held = os.pipe()
        try:
            with tempfile.TemporaryFile() as asked:
                asked.write(json.dumps(question, default=str).encode() + b"\n")
                asked.seek(0)
                self._process = subprocess.Popen(
                    [sys.executable, "-m", LAUNCHER, json.dumps({"port": port, **command.limits}), *command.words],
                    stdin=asked,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    cwd=command.folder,
                    env=environment | own | {LIFELINE: str(lifeline)},
                    pass_fds=(lifeline,),
                    start_new_session=True,
                    bufsize=0,
                )
        except BaseException:
            os.close(held)
            home.cleanup()
            raise
        finally:
            os.close(lifeline)
        self._stop, self._stopped = os.pipe()
        self._watcher = threading.Thread(target=self._watch, args=(on_end,), name="agent", daemon=True)
        self._watcher.start()
        self._end = weakref.finalize(self, end_program, self._process, held, token, home)

    def close(self) -> None:
        """End the program and all that it started, and remove its home folder."""
        if self._end.alive:
            os.close(self._stopped)  # ends the watcher's wait, who uses the pipes
            self._watcher.join()
            os.close(self._stop)
            self._process.terminate()  # the launcher ends all that the program has started
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(GRACE_S)
            self._end()

    def _watch(self, on_end: Callable[[Ended], None]) -> None:
        """Read what the program prints until it ends; what it has started may keep the pipes open."""
        process = self._process
        assert process.stdout and process.stderr
        streams = {process.stdout.fileno(): bytearray(), process.stderr.fileno(): bytearray()}
        poll, ending, num_bytes = select.poll(), os.pidfd_open(process.pid), 0
        try:
            for descriptor in (*streams, ending, self._stop):
                poll.register(descriptor, select.POLLIN)
            while True:
                ready = [descriptor for descriptor, _ in poll.poll()]
                if self._stop in ready:
                    return
                pieces = {one: os.read(one, PIECE_BYTES) for one in ready if one in streams}
                for descriptor, piece in pieces.items():
                    num_bytes += len(piece)
                    streams[descriptor] = (streams[descriptor] + piece)[-KEPT_BYTES:]
                    if not piece:
                        poll.unregister(descriptor)
                if num_bytes > MOST_PRINTED_BYTES:
                    process.terminate()
                if ending in ready and not any(pieces.values()):
                    break
        finally:
            os.close(ending)
        printed, complaint = (bytes(one).decode(errors="replace") for one in streams.values())
        if num_bytes > MOST_PRINTED_BYTES:
            complaint = f"it printed more than {MOST_PRINTED_BYTES >> 20} MiB"
        on_end(Ended(process.wait(), printed, complaint))
