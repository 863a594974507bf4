"""Model-written code is rewarded if it passes its row's tests, in a sandbox that it cannot escape."""

import os
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from stages.core.errors import ResourceError
from stages.data.messages import PlainText
from stages.rewards import code_program, sandbox
from stages.rewards.code import CodeReward
from stages.rewards.reward import Completion, RewardContext

CONTEXT = RewardContext({}, Path("/nowhere"), lambda message: None)
ADDS = "def add(a, b):\n    return a + b\n"
TESTS = ["assert add(1, 2) == 3", "assert add(-1, 1) == 0"]


def score(text: str, tests: Any = TESTS, **config: Any) -> float:
    reward = CodeReward.model_validate({"type": "code", "timeout_s": 30, **config})
    return reward.score(Completion("", text, 1, None, {"tests": tests}, PlainText("", "")))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (ADDS, 1),
        (f"It is simple:\n```python\n{ADDS}```\nThat is all.", 1),
        (f"```py\nno python\n```\nRather:\n```\n{ADDS}\n```", 1),
        (f"```\nno python\n```\n```python3.11 \n{ADDS}``` \n```python\nwithout an end", 1),
        (f"```\n{ADDS}```\n```sql\nSELECT 1\n```", 1),
        ("def add(a, b):\n    return a - b", 0),
        ("```python\ndef add(a, b) return\n```", 0),
        ("I cannot do that.", 0),
        ("", 0),
        ("exit(0)", 0),
        ("import os\nos._exit(0)", 0),
        (ADDS + "print('x' * 1_000_000)\nopen('a.txt', 'w').write('3')\nassert open('a.txt').read() == '3'", 1),
        ("import numpy, threading, tempfile, decimal, asyncio\n" + ADDS, 1),
        (ADDS + "import fcntl, os\nos.set_blocking(os.dup(1), False)\nfcntl.lockf(open('a', 'w'), fcntl.LOCK_EX)", 1),
        (ADDS + "import fcntl, os\nfcntl.fcntl(os.pipe()[0], fcntl.F_SETFL, os.O_NONBLOCK)", 1),
        (ADDS + "import mmap, tempfile\nmmap.mmap(-1, 4096)[:3] = b'abc'\ntempfile.TemporaryFile().write(b'x')", 1),
        (ADDS + "import atexit, time\natexit.register(time.sleep, 1000)", 1),
    ],
)
def test_all_tests_pass_or_not(text: str, expected: float) -> None:
    assert score(text) == expected


def test_tests_may_be_one_text_and_see_what_the_code_left() -> None:
    assert score(ADDS, "def check(f):\n    assert f(1, 2) == 3\n\ncheck(add)") == 1
    assert score(ADDS, "def check(f):\n    assert f(1, 2) == 4\n\ncheck(add)") == 0


KILLS_BY_PIPE = """
import fcntl, os

read, write = os.pipe()
fcntl.fcntl(read, fcntl.F_SETOWN, OWNER)
fcntl.fcntl(read, fcntl.F_SETSIG, 9)
fcntl.fcntl(read, fcntl.F_SETFL, os.O_ASYNC)
os.write(write, b"x")
"""
ATTACKS = {
    "opens a connection": "import socket\nsocket.create_connection(('127.0.0.1', {port}), timeout=5)",
    "makes a socket": "import socket\nsocket.socket(socket.AF_UNIX)",
    "forks": "import os\nif os.fork() == 0:\n    os._exit(0)",
    "starts a program": "import subprocess\nsubprocess.run(['/bin/true'])",
    "becomes a program": "import os\nos.execv('/bin/true', ['true'])",
    "starts a thread": "import threading\nthreading.Thread(target=print).start()",
    "writes beside its folder": "open('{outside}/new', 'w')",
    "appends to a file": "open('{outside}/file', 'a').write('x')",
    "empties a file": "import os\nos.truncate('{outside}/file', 0)",
    "empties a file by reading it": "import os\nos.open('{outside}/file', os.O_RDONLY | os.O_TRUNC)",
    "deletes a file": "import os\nos.unlink('{outside}/file')",
    "opens a file to all": "import os\nos.chmod('{outside}/file', 0o777)",
    "reads a file": "open('{outside}/file').read()",
    "reads it by a link": "import os\nos.symlink('{outside}/file', 'link')\nopen('link').read()",
    "reads the environment of its parent": "import os\nopen(f'/proc/{{os.getppid()}}/environ').read()",
    "reads its own memory's map": "open('/proc/self/maps').read()",
    "finds a key": "import os\nassert 'planted' in repr(os.environ)",
    "kills its parent": "import os\nos.kill(os.getppid(), 9)",
    "signals its parent": "import os\nos.kill(os.getppid(), 0)",
    "has a pipe kill its parent": KILLS_BY_PIPE.replace("OWNER", "os.getppid()"),
    "has a pipe kill a group": KILLS_BY_PIPE.replace("OWNER", "-os.getpgid(os.getppid())"),
    "has a pipe signal its parent": "import fcntl, os\nfcntl.fcntl(os.pipe()[0], fcntl.F_SETOWN, os.getppid())",
    "names an owner of another kind": "import fcntl, os, struct\n"
    "fcntl.fcntl(os.pipe()[0], 15, struct.pack('ii', 1, os.getppid()))",
    "names an owner by ioctl": "import fcntl, os, struct\n"
    "fcntl.ioctl(os.pipe()[0], 0x8901, struct.pack('i', os.getppid()))",
    "has a pipe signal": "import fcntl, os, signal\nfcntl.fcntl(os.pipe()[0], fcntl.F_SETSIG, 9)",
    "waits for a signal of a pipe": "import fcntl, os\nfcntl.fcntl(os.pipe()[0], fcntl.F_SETFL, os.O_ASYNC)",
    "watches a folder": "import fcntl, os\nfcntl.fcntl(os.open('.', 0), fcntl.F_NOTIFY, fcntl.DN_CREATE)",
    "leases a file": "import fcntl\nfcntl.fcntl(open('a', 'w'), fcntl.F_SETLEASE, fcntl.F_WRLCK)",
    "fcntl with more bits": "import ctypes, os\n"
    "assert ctypes.CDLL(None).syscall(72, os.pipe()[0], ctypes.c_long(8 + (1 << 32)), os.getppid()) == 0",
    "becomes the owner of a terminal": "import os\nos.setsid()",
    "has a timer signal": "import ctypes\n"
    "assert ctypes.CDLL(None).timer_create(0, None, ctypes.byref(ctypes.c_long())) == 0",
    "signals by another call": "import ctypes, os\nassert ctypes.CDLL(None).syscall(200, os.getppid(), 0) == 0",
    "opens a process": "import os\nos.pidfd_open(os.getppid())",
    "makes a file without a name": "import os\nos.open('.', os.O_TMPFILE | os.O_RDWR)",
    "reserves a file": "import os\nos.posix_fallocate(os.open('a', os.O_RDWR | os.O_CREAT), 0, 1)",
    "shares a file": "import mmap, os\n"
    "file = os.open('a', os.O_RDWR | os.O_CREAT)\nos.truncate(file, 4096)\nmmap.mmap(file, 4096)",
    "kills all": "import os\nos.kill(-1, 9)",
    "raises its limits": "import resource\nresource.setrlimit(resource.RLIMIT_AS, (-1, -1))",
    "lowers its parent's": "import os, resource\nresource.prlimit(os.getppid(), resource.RLIMIT_NOFILE, (9, 9))",
    "takes memory": "held = bytearray(2 << 30)",
    "takes memory elsewhere": "import os\nos.memfd_create('x')",
    "makes a folder": "import os\nos.mkdir('within')",
    "opens many files": "held = [open('a', 'w') for _ in range(100)]",
    "writes a large file": "import signal\nsignal.signal(25, signal.SIG_IGN)\nopen('a', 'wb').write(bytes(32 << 20))",
    "passes early": "import sys\nsys.exit(0)",
}


@pytest.mark.parametrize("attack", ATTACKS)
def test_what_is_no_computing_fails(attack: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Model-written code that attacks the sandbox, and would pass in an unprotected process, gets a reward of 0."""
    monkeypatch.setenv("VLLM_API_KEY", "planted")
    monkeypatch.setenv("ANY_OTHER", "planted")
    (tmp_path / "file").write_text("what is in it")
    mode, limits = (tmp_path / "file").stat().st_mode, psutil.Process().rlimit(psutil.RLIMIT_NOFILE)
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        assert score(ATTACKS[attack].format(outside=tmp_path, port=port), ["assert True"]) == 0
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
    assert (tmp_path / "file").read_text() == "what is in it"
    assert (tmp_path / "file").stat().st_mode == mode
    assert psutil.Process().rlimit(psutil.RLIMIT_NOFILE) == limits


DELETES_WHAT_IT_WRITES = """
import os

held = []
while True:
    held.append(open("a", "wb", buffering=0))
    os.unlink("a")
    held[-1].write(bytes(15 << 20))
    del held[:-20]
"""


@pytest.mark.parametrize(
    "code",
    [
        "while True:\n    pass",
        "import time\ntime.sleep(10_000)",
        "import signal\nfor number in (14, 15, 24):\n    signal.signal(number, signal.SIG_IGN)\nwhile True:\n    pass",
        "import os\nwhile True:\n    try:\n        os.fork()\n    except OSError:\n        pass",
        "number = 0\nwhile True:\n    open(str(number), 'wb').write(bytes(1 << 20))\n    number += 1",
        "number = 0\nwhile True:\n    open(str(number), 'wb').close()\n    number += 1",
        "import os\nos.write(3, bytes(1 << 20))",
        "import os\nos.write(4, bytes(1 << 20))",
    ],
)
def test_what_does_not_end_is_ended_and_leaves_nothing(
    code: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    began_s = time.monotonic()
    assert score(code, timeout_s=2) == 0
    assert time.monotonic() - began_s < 60
    children = [child.as_dict(["cmdline"])["cmdline"] for child in psutil.Process().children()]
    assert not [line for line in children if "code_program" in " ".join(line or ())]
    assert not list(tmp_path.iterdir())


def test_code_ends_with_the_process_that_asked_for_it(tmp_path: Path) -> None:
    """Model-written code ends with the stage process that runs it, also if that process is killed."""
    asks = "from tests.unit.stages.rewards.test_code import score\nscore('import time; time.sleep(10_000)')"
    root = Path(__file__).parents[4]
    environment = {**os.environ, "PYTHONPATH": str(root), "TMPDIR": str(tmp_path)}
    with subprocess.Popen([sys.executable, "-c", asks], cwd=root, env=environment) as process:
        while not (children := psutil.Process(process.pid).children()):
            assert process.poll() is None
            time.sleep(0.01)
        while "Seccomp:\t2" not in Path(f"/proc/{children[0].pid}/status").read_text():
            time.sleep(0.01)
        process.kill()
    psutil.wait_procs(children, timeout=60)
    assert not children[0].is_running()


WITHOUT_LIBRARY = """
import ctypes, runpy, sys

def load(name, *options, own=ctypes.CDLL, **more):
    return own(name and "none.so", *options, **more)

ctypes.CDLL = load
runpy.run_module("stages.rewards.code_program", run_name="__main__")
"""


def test_where_code_cannot_be_kept_within_limits_none_is_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """Model-written code is not run where the sandbox's probe fails, such as without libseccomp."""
    reward = CodeReward(type="code")
    with reward.opened("passes", CONTEXT) as scores:
        completion = Completion("", ADDS, 1, None, {"tests": TESTS}, PlainText("", ""))
        assert list(scores([completion] * 3)) == [1, 1, 1]
    monkeypatch.setattr(sandbox, "PROGRAM", ("-c", WITHOUT_LIBRARY))
    with pytest.raises(ResourceError, match=r"the reward passes would run code .* \(OSError: none.so.*needs Linux"):
        reward.opened("passes", CONTEXT).__enter__()
    assert reward.score(completion) == 0


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ({"tests": "assert add(1, 2) == 3"}, None),
        ({"tests": TESTS}, None),
        ({"test": "assert True"}, "has no tests in `tests`"),
        ({"tests": []}, "has no tests in `tests`, but []"),
        ({"tests": ["", 5]}, 'has no tests in `tests`, but ["", 5]; expected code'),
        ({"tests": "assert add(1, 2) = 3"}, "has a test in `tests` that is no Python"),
    ],
)
def test_rows_without_tests_are_found_before_anything_is_asked(row: dict[str, Any], expected: str | None) -> None:
    found = CodeReward(type="code").row_problem(None, row)
    assert found is None if expected is None else found.startswith(expected)


@pytest.mark.parametrize("test", ["-" * 200_000 + "1", "held = bytearray(2 << 30)"])
def test_a_test_that_takes_all_memory_has_failed(test: str) -> None:
    assert score(ADDS, test) == 0
    assert CodeReward(type="code").row_problem(None, {"tests": test}) is None


def test_what_code_writes_is_counted_where_it_is_deleted_as_well(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bytes that model-written code writes count, even if deleted, and end it long before its time limit."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    began_s = time.monotonic()
    assert score(DELETES_WHAT_IT_WRITES, timeout_s=300) == 0
    assert time.monotonic() - began_s < 100


def test_code_in_many_blocks_without_an_end_is_looked_for_in_linear_time() -> None:
    began_s = time.process_time()
    assert score("```python\nx\n" * 100_000) == 0
    assert time.process_time() - began_s < 5


RESTRICTED = """
import os, sys
from pathlib import Path
from stages.rewards import code_program

code_program.restrict_files([Path("/")], [])
os.kill(os.getpid(), 0)
try:
    os.kill(os.getppid(), 0)
except PermissionError:
    print("refused")
"""


@pytest.mark.skipif(
    code_program.landlock_version() < code_program.SCOPE_VERSION, reason="the kernel's Landlock has no scopes"
)
def test_landlock_refuses_signals_as_well_where_it_can() -> None:
    done = subprocess.run([sys.executable, "-c", RESTRICTED], capture_output=True, text=True, check=True)
    assert done.stdout == "refused\n"
