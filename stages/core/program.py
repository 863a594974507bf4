"""Client of a helper process (a "program") that works on untrusted input within limits of time and memory.

Code, patterns, formulas and templates from outside may take any time and any memory. They are worked on by a *program*,
a module that calls `program_loop.answer_questions`; this is the asking side:

    with Program("stages.rewards.math_program", "5") as program:
        found = program.ask({"text": "$1$", "reference": "1"}, timeout_s=6)

A question and its answer are JSON, of any size: one question with many rows costs less than many with one (some 30 µs
each). The program has a bare environment (no keys, a home only if given one), and a session of its own; with all that
it starts, it ends with this process, however that ends.
"""

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
import weakref
from pathlib import Path
from typing import Any, Self

from stages.core.process_tree import TOKEN_VARIABLE, end_processes, marked_processes
from stages.core.program_loop import LIFELINE

START_TIMEOUT_S = 300.0
"""Time limit in seconds for a helper process to start and import its modules, even on a busy machine."""
GRACE_S = 5.0
MAX_ANSWER_BYTES = 256 << 20
PIECE_BYTES = 1 << 16
"""Number of bytes written at once to a helper process's standard input, the capacity of a pipe."""
LONGEST_POLL_S = 1000.0

NOWHERE = Path("/nonexistent")
"""Missing home directory of helper processes that need none; a real folder would be left after a kill."""
PASSED_ON = ("PATH", "LD_LIBRARY_PATH", "LANG", "LC_ALL", "LC_CTYPE", "TZ", "OMP_NUM_THREADS")

_ENCODER = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"), default=str)


class ProgramError(Exception):
    """Raised when a helper process returns an error for a request, and continues. kind: its class's name."""

    def __init__(self, kind: str, text: str) -> None:
        super().__init__(text if kind == "RefusedError" else f"{kind}: {text}")
        self.kind = kind


class ProgramEndedError(Exception):
    """Raised when a helper process ended, or was ended because its response could not be read."""


class Program:
    """Client of a helper process for untrusted input, which starts at the first request; for one thread at a time."""

    def __init__(self, module: str, *arguments: str, needs_home: bool = False, python: Path | None = None) -> None:
        """Create the client. needs_home: the process gets an empty home folder, removed when this one ends normally.

        python: interpreter of another environment.
        """
        self._needs_home = needs_home
        self._command = [str(python or sys.executable), "-m", module, *arguments]
        self._process: subprocess.Popen[bytes] | None = None
        self._end: weakref.finalize[Any, Any] | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def start(self, timeout_s: float = START_TIMEOUT_S) -> None:
        """Start the helper process and wait until it is ready; do nothing if it runs already. Raises as `ask`."""
        if self._process is None:
            self._launch()
            try:
                # The program speaks first: without a question it says that its imports are done, or have failed.
                self._answer(b"", timeout_s)
            except BaseException:
                self.close()
                raise

    def ask(self, question: Any, timeout_s: float) -> Any:
        """Send a request to the helper process and return its response; start the process if it does not run.

        timeout_s: from here to the answer's last byte. Raises TimeoutError when that is over, or the program's own
        limit of CPU time is; ProgramError for an error of its function; ProgramEndedError. It is ended where it may
        still be at work on the question.
        """
        # `surrogatepass`: texts may hold half of a character, which UTF-8 refuses.
        line = _ENCODER.encode(question).encode("utf-8", "surrogatepass") + b"\n"
        self.start()
        return self._answer(line, timeout_s)

    def ask_hostile(self, question: Any, timeout_s: float) -> Any:
        """Send a request that may exhaust time, memory or stack of the helper process: each raises TimeoutError.

        Which of these, or the process itself, is gone first depends on the machine.
        """
        # Outside of the `try`: a program that cannot be started is an error of its own, no timeout.
        self.start()
        try:
            return self.ask(question, timeout_s)
        except ProgramEndedError as error:
            raise TimeoutError from error
        except ProgramError as error:
            if error.kind in ("MemoryError", "RecursionError"):
                raise TimeoutError from error
            raise

    def close(self) -> None:
        """End the helper process and its children at once; a later request starts it again."""
        if self._end is not None:
            self._end()
        self._process = self._end = None

    def _launch(self) -> None:
        home = tempfile.TemporaryDirectory(prefix="program-", ignore_cleanup_errors=True) if self._needs_home else None
        environment = bare_environment(Path(home.name) if home else NOWHERE)
        token = os.urandom(16).hex()
        # Only this process holds the writing end: its end closes the pipe, and the program is killed.
        lifeline, held = os.pipe()
        try:
            self._process = subprocess.Popen(
                self._command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                env=environment | {TOKEN_VARIABLE: token, LIFELINE: str(lifeline)},
                pass_fds=(lifeline,),
                # A process group of its own, which is killed as a whole.
                start_new_session=True,
                bufsize=0,
            )
        except BaseException:
            os.close(held)
            if home:
                home.cleanup()
            raise
        finally:
            os.close(lifeline)
        # Runs at `close`, when this object is collected, or when the interpreter exits, but once only.
        self._end = weakref.finalize(self, end_program, self._process, held, token, home)
        assert self._process.stdin and self._process.stdout
        os.set_blocking(self._process.stdin.fileno(), False)
        os.set_blocking(self._process.stdout.fileno(), False)

    def _answer(self, question: bytes, timeout_s: float) -> Any:
        try:
            outcome, content = _decoded(self._exchanged(question, time.monotonic() + timeout_s))
        except BaseException:  # an interrupt as well: the next question must not get this one's answer
            self.close()
            raise
        if outcome == "answer":
            return content
        kind, text = content
        if kind in ("TimeLimitError", "TimeoutError"):
            raise TimeoutError
        raise ProgramError(kind, text)

    def _exchanged(self, question: bytes, deadline_s: float) -> bytes:
        """Send a request to the helper process as one line, and return its response, also one line.

        Both pipes are served at once, until the deadline: a program may stop to read or write in the middle of a line.
        """
        assert self._process and self._process.stdin and self._process.stdout
        questions, answers = self._process.stdin.fileno(), self._process.stdout.fileno()
        left, answer = memoryview(question), bytearray()
        while not answer.endswith(b"\n"):
            try:
                left = left[os.write(questions, left) :] if left else left
            except BlockingIOError:  # the pipe is full
                pass
            except BrokenPipeError:  # its answer, or that there is none, says why
                left = left[:0]
            if (remaining_s := deadline_s - time.monotonic()) <= 0:
                raise TimeoutError
            poll = select.poll()
            poll.register(answers, select.POLLIN)
            if left:
                poll.register(questions, select.POLLOUT)
            # Milliseconds, a C int: a time limit without end would overflow.
            poll.poll(min(remaining_s, LONGEST_POLL_S) * 1000)
            with contextlib.suppress(BlockingIOError):
                if not (piece := os.read(answers, PIECE_BYTES)):
                    raise ProgramEndedError(self._ending())
                answer += piece
            if len(answer) > MAX_ANSWER_BYTES:
                raise ProgramEndedError(f"answered with more than {MAX_ANSWER_BYTES >> 20} MiB")
        # The rest of this question would be read as the next one.
        if left:
            raise ProgramEndedError("answered before it had read the question")
        return bytes(answer)

    def _ending(self) -> str:
        """Return in words how the helper process ended or closed its output, for an error message."""
        assert self._process
        try:
            return f"ended its process with exit code {self._process.wait(GRACE_S)}"
        except subprocess.TimeoutExpired:
            return "closed its output"


def bare_environment(home: Path) -> dict[str, str]:
    """Return an environment without secrets for untrusted code: PATH, PYTHONPATH, the locale and an empty HOME."""
    passed_on = {name: os.environ[name] for name in PASSED_ON if name in os.environ}
    ours = str(Path(__file__).parents[2])
    python_path = os.pathsep.join(filter(None, [ours, os.environ.get("PYTHONPATH")]))
    return {**passed_on, "PYTHONPATH": python_path, "HOME": str(home), "TMPDIR": str(home)}


def _decoded(line: bytes) -> tuple[str, Any]:
    """Decode a response line into `answer` or `error`, and its content; ProgramEndedError for any other line."""
    try:
        ((outcome, content),) = json.loads(line).items()
    except (ValueError, AttributeError, RecursionError) as error:
        raise ProgramEndedError(f"wrote a line that is no answer ({type(error).__name__})") from error
    return outcome, content


def end_program(
    process: subprocess.Popen[bytes], lifeline: int, token: str, home: tempfile.TemporaryDirectory[str] | None
) -> None:
    """Kill a helper process and everything that it started, and remove its temporary home folder if it has one."""
    if process.returncode is None:  # its number is its own as long as its end has not been asked for
        os.killpg(process.pid, signal.SIGKILL)
    with process:  # closes the pipes, and waits
        pass
    os.close(lifeline)
    # What has left the process group is found by its token.
    end_processes(lambda: marked_processes(token, session=process.pid))
    if home:
        home.cleanup()
