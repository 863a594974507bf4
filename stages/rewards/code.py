"""Reward by tests: 1 where the code in a completion passes the tests in its dataset row within limits, else 0.

This parent of the sandbox starts and watches `code_program.py`, the child that confines itself.
"""

import contextlib
import json
import math
import os
import re
import secrets
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from stages.core.errors import ResourceError
from stages.core.fields import Seconds
from stages.core.program import bare_environment
from stages.core.redaction import shortened
from stages.rewards.reward import Completion, CompletionReward, RewardContext, Scores

BLOCK_BEGIN = re.compile(r"```[ \t]*(?:python|py)?[0-9.]*[ \t]*", re.IGNORECASE)
BLOCK_END = re.compile(r"```[ \t]*")
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


class CodeReward(CompletionReward):
    """Reward of 1 where the completion's code (last Python block, or all of it) passes all tests of its row, else 0.

    The code runs in its own process: no network, no other process or thread, no file outside its own folder, no keys.
    """

    type: Literal["code"]
    tests: str = Field("tests", min_length=1, description="Dataset column of the tests: Python code, or a list of it.")
    timeout_s: Seconds = Field(10.0, description="Time limit of a completion's code with all its tests, in seconds.")
    memory_gib: float = Field(
        1.0, ge=0.125, le=1024, description="Limit on the address space of the process that runs the code, in GiB."
    )

    def row_problem(self, reference: str | None, row: Mapping[str, Any]) -> str | None:
        content = row.get(self.tests)
        if content is None:
            return f"has no tests in `{self.tests}`"
        if not _tests_in(content):
            shown = shortened(json.dumps(content, default=str), 60)
            return f"has no tests in `{self.tests}`, but {shown}; expected code, or a list"
        for test in _tests_in(content):
            try:
                compile(test, self.tests, "exec")
            except (SyntaxError, ValueError) as error:
                return f"has a test in `{self.tests}` that is no Python ({error})"
            except (MemoryError, RecursionError):  # nested too deeply for the parser: it is Python, and a failed test
                continue
        return None

    def score(self, completion: Completion) -> float:
        return float(self._passes(_code_in(completion.text), _tests_in(completion.row[self.tests]))[0])

    @contextlib.contextmanager
    def opened(self, name: str, context: RewardContext) -> Iterator[Scores]:
        """Prove that the sandbox works (else ResourceError), and yield the function that scores completions."""
        # the reward itself on code that tries to break out: it passes only if every call was refused
        passed, answer = self._passes(PROBE, ("assert True",))
        if not Path("/proc/self/io").is_file():
            passed, answer = False, "its kernel does not count what a process writes, in /proc/PID/io"
        if not passed:
            raise ResourceError(
                f"the reward {name} would run code of a model, which this machine cannot confine "
                f"({answer or 'forbidden calls were not refused in time'}); it needs Linux 5.13 or later with "
                "Landlock, seccomp and libseccomp.so.2 (on Debian, libseccomp2)"
            )
        pool = ThreadPoolExecutor(len(os.sched_getaffinity(0)))
        try:
            yield lambda completions: pool.map(self.score, completions)
        finally:
            pool.shutdown(cancel_futures=True)

    def custom_code(self) -> str:
        return "code in the model's answers, within limits"

    def _passes(self, code: str, tests: tuple[str, ...]) -> tuple[bool, str]:
        """Run code with its tests in the sandbox; return whether all passed in time, and the sandbox's answer."""
        # The child repeats it when all tests pass, so code that ends early or prints does not pass. Code that searches
        # its own process for the word could: tests in one process with what they test cannot prevent that.
        word = secrets.token_hex()
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
                try:
                    with contextlib.suppress(BrokenPipeError):  # it has ended, so its empty answer fails the test
                        process.stdin.write(json.dumps({"code": code, "tests": tests, "word": word}).encode())
                        process.stdin.close()
                    ended = self._await_end(process, Path(folder))
                finally:
                    # before its answer is read: the pipe is then closed, and the read ends
                    process.kill()
                answer = process.stdout.read(ANSWER_BYTES).decode(errors="replace")
        return ended and answer == word, answer

    def _await_end(self, process: subprocess.Popen[bytes], folder: Path) -> bool:
        """Return whether the sandbox's process ended by itself, within its limits of time and disk."""
        end_s = time.monotonic() + self.timeout_s
        while time.monotonic() < end_s:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(LOOK_EVERY_S)
                return True
            if not _is_small(folder) or _num_written(process.pid) > WRITTEN_BYTES:
                return False
        return False


def _code_in(text: str) -> str:
    """Return a completion's last Python block, else all; by lines, as a pattern of blocks takes quadratic time."""
    code = text
    block: list[str] | None = None
    for line in text.split("\n"):
        if block is None:
            block = [] if BLOCK_BEGIN.fullmatch(line) else None
        elif BLOCK_END.fullmatch(line):
            code, block = "".join(block), None
        else:
            block.append(f"{line}\n")
    return code


def _tests_in(content: object) -> tuple[str, ...]:
    """Return the tests in the value of a dataset column; empty where there are none."""
    tests = tuple(content) if isinstance(content, list) else (content,)
    return tests if all(isinstance(test, str) and test.strip() for test in tests) else ()


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
