"""Sandbox for code that a model wrote: starts, watches and ends `code_program.py`, the process that confines itself."""

import contextlib
import json
import math
import os
import secrets
import select
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stages.core.errors import ResourceError
from stages.core.program import bare_environment

MIB, GIB = 1 << 20, 1 << 30
FILE_BYTES = 16 * MIB
FOLDER_BYTES = 64 * MIB
WRITTEN_BYTES = 256 * MIB
"""Limit on all bytes that model-written code writes, also to deleted files, pipes and discarded output."""
NUM_FILES = 1000
"""Limit on the number of files that model-written code may have in its folder."""
LOOK_EVERY_S = 0.05
ANSWER_BYTES = 4096
"""Largest number of bytes that are read from the sandbox's process as its answer."""
PIECE_BYTES = 1 << 16
PROGRAM = ("-m", "stages.rewards.code_program")
THREADS = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
"""Environment variables that keep NumPy from starting threads, which would fail in the sandbox."""
PROBE = """
import fcntl, mmap, os, signal, socket

pipe, parent = os.pipe()[0], os.getppid()
open("within", "w").close()
within = os.open("within", os.O_RDWR)
for refused, *arguments in (
    (socket.socket,), (os.fork,), (os.listdir, ".."), (open, "../new", "w"), (open, f"/proc/{parent}/environ"),
    (os.kill, parent, 0), (fcntl.fcntl, pipe, fcntl.F_SETOWN, parent),
    (fcntl.fcntl, pipe, fcntl.F_SETSIG, signal.SIGKILL), (fcntl.fcntl, pipe, fcntl.F_SETFL, os.O_ASYNC),
    (fcntl.ioctl, pipe, 0x8901, parent.to_bytes(4, "little")), (os.posix_fallocate, within, 0, 1),
    (os.open, ".", os.O_TMPFILE | os.O_RDWR), (os.memfd_create, "x"),
):
    try:
        refused(*arguments)
    except PermissionError:
        continue
    raise AssertionError("this was not refused")
"""
"""Code that tries everything that the sandbox must refuse; it is run once, to prove that the sandbox works."""


@dataclass(frozen=True)
class Sandbox:
    """Sandbox with limits: no network, no other process or thread, no file outside an own folder, no keys.

    timeout_s: wall-clock time of a run. memory_gib: address space.
    """

    timeout_s: float
    memory_gib: float

    def prove(self, user: str) -> None:
        """Prove that this machine can confine code. Raises ResourceError otherwise.

        user: what would run code, in the message.
        """
        # code that tries to break out: it passes only if every call was refused
        passed, answer = self.passes(PROBE, ("assert True",))
        if not Path("/proc/self/io").is_file():
            passed, answer = False, "its kernel does not count what a process writes, in /proc/PID/io"
        if not passed:
            raise ResourceError(
                f"{user} would run code of a model, which this machine cannot confine "
                f"({answer or 'forbidden calls were not refused in time'}); it needs Linux 5.13 or later with "
                "Landlock, seccomp and libseccomp.so.2 (on Debian, libseccomp2)"
            )

    def passes(self, code: str, tests: tuple[str, ...]) -> tuple[bool, str]:
        """Run code with its tests; return whether all passed in time, and the process's answer."""
        # The child repeats it when all tests pass, so code that ends early or prints does not pass. Code that searches
        # its own process for the word could: tests in one process with what they test cannot prevent that.
        word = secrets.token_hex()
        problem, answer = self._run({"code": code, "tests": tests, "word": word}, ANSWER_BYTES)
        return not problem and answer == word, answer

    def output(self, code: str, most_bytes: int) -> tuple[str | None, str]:
        """Run code; return how its process failed, None if it did not, and what it printed, also as errors.

        most_bytes: of the output; code that prints more is ended.
        """
        return self._run({"code": code}, most_bytes)

    def _run(self, question: dict[str, Any], most_bytes: int) -> tuple[str | None, str]:
        """Ask the confined process; return how it failed, if it did, and its answer, cut to `most_bytes`."""
        limits = {
            "cpu_s": math.ceil(self.timeout_s),
            "memory_bytes": int(self.memory_gib * GIB),
            "file_bytes": FILE_BYTES,
        }
        command = [sys.executable, "-s", *PROGRAM, json.dumps(limits)]
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
        with tempfile.TemporaryDirectory(prefix="code-", ignore_cleanup_errors=True) as folder:
            environment = bare_environment(Path(folder)) | dict.fromkeys(THREADS, "1")
            own: dict[str, Any] = {"cwd": folder, "env": environment, "start_new_session": True}
            with subprocess.Popen(command, **pipes, **own) as process:
                assert process.stdin and process.stdout
                answer = bytearray()
                try:
                    with contextlib.suppress(BrokenPipeError):  # it has ended, so its empty answer fails the test
                        process.stdin.write(json.dumps(question).encode())
                        process.stdin.close()
                    ended = self._await_end(process, Path(folder), answer, most_bytes)
                finally:
                    process.kill()
        problem = None
        if not ended:
            problem = f"the code took over {self.timeout_s:g} s, or printed or wrote too much, and was ended"
        elif process.returncode:
            problem = f"the code's process ended with exit code {process.returncode}"
        return problem, answer[:most_bytes].decode(errors="replace")

    def _await_end(self, process: subprocess.Popen[bytes], folder: Path, answer: bytearray, most_bytes: int) -> bool:
        """Read a process's answer; return whether it ended by itself, within its limits of time, disk and output."""
        assert process.stdout
        answers = process.stdout.fileno()
        os.set_blocking(answers, False)
        end_s = time.monotonic() + self.timeout_s
        is_open = True
        while time.monotonic() < end_s:
            if is_open:
                # Until the pipe closes: a process that nothing reads from stops at 64 KiB.
                select.select([answers], [], [], LOOK_EVERY_S)
                with contextlib.suppress(BlockingIOError):
                    piece = os.read(answers, PIECE_BYTES)
                    answer += piece
                    is_open = bool(piece)
                if len(answer) > most_bytes:
                    return False
            else:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(LOOK_EVERY_S)
                    return True
            if not _is_small(folder) or _num_written(process.pid) > WRITTEN_BYTES:
                return False
        return False


def _is_small(folder: Path) -> bool:
    """Return whether the files that model-written code has made are within the limits on number and size."""
    num_bytes = 0
    for num_files, file in enumerate(folder.iterdir(), 1):
        with contextlib.suppress(FileNotFoundError):  # the code has removed it meanwhile
            # blocks are of 512 bytes on every file system; lstat: a link counts for itself, not for its target
            num_bytes += file.lstat().st_blocks * 512
        if num_files > NUM_FILES or num_bytes > FOLDER_BYTES:
            return False
    return True


def _num_written(pid: int) -> int:
    """Return the number of bytes that a process has written to files, pipes and streams; 0 once it has ended."""
    try:
        fields = dict(line.split(": ") for line in Path(f"/proc/{pid}/io").read_text().splitlines())
    except (FileNotFoundError, ProcessLookupError):
        return 0
    # bytes passed to write(2), whether or not they reached a disk
    return int(fields["wchar"])
