"""Start of a command under a supervisor process (`process_tree.py`), which leaves no descendant behind.

The supervisor ends all descendants when this process is gone, this process when the supervisor is.
"""

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO

from stages.core import process_tree
from stages.core.process_tree import TOKEN_VARIABLE, end_processes, marked_processes

PRIVATE_UMASK = 0o077
REQUESTS_TO_END = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


def signal_of(exit_code: int) -> int | None:
    """Return the signal that ended a process, by its exit code (-n or 128 + n); None if it exited by itself."""
    number = -exit_code if exit_code < 0 else exit_code - 128
    return number if 0 < number < signal.NSIG else None


def was_killed(exit_code: int) -> bool:
    """Return whether a signal such as SIGKILL or SIGSEGV ended a process, and not a request to end such as SIGTERM."""
    number = signal_of(exit_code)
    return number is not None and number not in REQUESTS_TO_END


class SupervisedProcess:
    """Running command under its supervisor process, which can be polled and stopped.

    token: marks its processes, to find stragglers after this process has died. output: receives stdout and stderr; the
    caller may close it at once. environment: the command's whole. grace_s: seconds between SIGTERM and SIGKILL.
    """

    def __init__(
        self,
        command: Sequence[str],
        *,
        environment: Mapping[str, str],
        output: IO[bytes],
        folder: Path | None = None,
        grace_s: float = 10.0,
    ):
        self.token = os.urandom(16).hex()
        self.grace_s = grace_s
        # A command within a supervised command bears both tokens, so that either finds it.
        tokens = ":".join(filter(None, [os.environ.get(TOKEN_VARIABLE), self.token]))
        lifeline, self._lifeline = os.pipe()
        try:
            self.process = subprocess.Popen(
                [sys.executable, "-I", "-S", process_tree.__file__, str(lifeline), str(grace_s), *command],
                env={**environment, TOKEN_VARIABLE: tokens},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                cwd=folder,
                pass_fds=(lifeline,),
                start_new_session=True,
                umask=PRIVATE_UMASK,
            )
        except BaseException:
            os.close(self._lifeline)
            raise
        finally:
            os.close(lifeline)
        self._closing = threading.Lock()
        self._closed = False

    @property
    def pid(self) -> int:
        """Process id of the supervisor, which is also the session id of the command."""
        return self.process.pid

    def poll(self) -> int | None:
        """Return the command's exit code, with no descendant left, or None while it runs.

        It is 128 + signal if the command was killed, and negative if the supervisor was.
        """
        code = self.process.poll()
        if code is not None:
            self._close()
        return code

    def alive(self) -> bool:
        return self.poll() is None

    def stop(self) -> None:
        """End the command and all its descendants, and wait until none is left; may be called again."""
        if self.process.poll() is None:
            self.process.terminate()
            try:
                # After the grace period the supervisor itself kills what is left, and removes shared memory.
                self.process.wait(self.grace_s + 15.0)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
        self._close()

    def _close(self) -> None:
        # Threads may see the end at once; a descriptor closed twice may be another's by then.
        with self._closing:
            if not self._closed:
                self._closed = True
                os.close(self._lifeline)
                end_processes(lambda: marked_processes(self.token, session=self.pid))
