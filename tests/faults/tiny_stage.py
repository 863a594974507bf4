"""Stand-in for a stage process, which behaves as its environment variable TINY says: succeeds, fails, hangs or dies.

It keeps the stage contract, and uses the standard library only.

python tiny_stage.py WORK_FOLDER
"""

import json
import mmap
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

WORK = Path(sys.argv[1])
SLEEPER = "import signal, sys, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(300)"


def result(**fields):
    (WORK / "data").mkdir(exist_ok=True)
    (WORK / "data" / "content").write_text(os.environ.get("TINY_CONTENT", "content"))
    # A plan reads the first rows of a dataset that is there.
    (WORK / "data" / "train.jsonl").write_text('{"prompt": "1+1", "completion": "2"}\n')
    (WORK / "result.json").write_text(json.dumps({"metrics": {"rows": 1.0}, **fields}))


def ok():
    time.sleep(float(os.environ.get("TINY_SECONDS", "0")))
    result()


def steps(pause_before=None):
    """Act as a stage of ten steps with a checkpoint after each. The result records the step at which it resumed."""
    scratch = WORK / "scratch"
    scratch.mkdir(exist_ok=True)
    checkpoint = scratch / "step"
    first = int(checkpoint.read_text()) if checkpoint.exists() else 0
    (WORK / "half").write_text("written by an attempt that may not finish")
    for step in range(first, 10):
        if step == pause_before:
            wait_for_release()
        time.sleep(float(os.environ.get("TINY_STEP_SECONDS", "0.1")))
        with (WORK / "metrics.jsonl").open("a") as stream:
            stream.write(json.dumps({"step": step, "time_ms": 0, "loss": 1.0}) + "\n")
        unfinished = scratch / "unfinished"
        unfinished.write_text(str(step + 1))
        unfinished.replace(checkpoint)  # the stage may be killed at any line
    (WORK / "half").unlink()
    result(metrics={"first_step": float(first)})


def stumble():
    """Act as a stage that fails at its fifth step when first run, and finishes its ten steps when run again."""
    stumbled = WORK / "scratch" / "stumbled"
    checkpoint = WORK / "scratch" / "step"
    if not stumbled.exists():
        stumbled.parent.mkdir(exist_ok=True)
        stumbled.touch()
        checkpoint.write_text("5")
        known_error()
    steps()


def names_in(folder):
    return sorted(path.name for path in folder.iterdir())


def inputs():
    """Act as a stage that records what it sees of the lifecycle home and of its input artifacts."""
    print("on another disk", flush=True)
    with (WORK / "events.jsonl").open("a") as stream:
        stream.write(json.dumps({"time_ms": 0, "event": "milestone", "message": "on another disk"}) + "\n")
    with (WORK / "metrics.jsonl").open("a") as stream:
        stream.write(json.dumps({"step": 0, "time_ms": 0, "loss": 1.0}) + "\n")
    given = json.loads((WORK / "config.json").read_text())["inputs"]
    seen = {name: names_in(Path(folder, "data")) for name, folder in given.items()}
    seen["home"] = names_in(Path(os.environ["LIFECYCLE_HOME"]))
    result()
    (WORK / "data" / "seen").write_text(json.dumps(seen))


def pause():
    """Act as a stage of ten steps that waits before the sixth until the test releases it."""
    steps(pause_before=5)


def linger():
    """Act as a stage of ten steps that hangs before the sixth when first run, but not when run again."""
    is_first = not (WORK / "scratch" / "step").exists()
    steps(pause_before=5 if is_first else None)


def linger_twice():
    """Act as a stage of ten steps that hangs before the sixth, and when run again from there before the eighth."""
    checkpoint = WORK / "scratch" / "step"
    done = int(checkpoint.read_text()) if checkpoint.exists() else 0
    steps(pause_before=next((step for step in (5, 7) if step > done), None))


def wait():
    wait_for_release()
    result()


def wait_for_release():
    """Report to the test that the stand-in stage is ready, and wait until the test lets it go on."""
    scratch = WORK / "scratch"
    scratch.mkdir(exist_ok=True)
    (scratch / "ready").touch()
    while not (scratch / "release").exists():
        time.sleep(0.05)


def family():
    """Act as a stage with child processes that ignore SIGTERM and have their own sessions, orphans among them."""
    for _ in range(2):
        subprocess.Popen([sys.executable, "-S", "-c", SLEEPER], start_new_session=True)
    subprocess.Popen(["sh", "-c", f"{sys.executable} -S -c '{SLEEPER}' & exit"], start_new_session=True).wait()
    (WORK / "scratch").mkdir(exist_ok=True)
    (WORK / "scratch" / "ready").touch()
    time.sleep(300)


def serve():
    result(lease={"url": "http://127.0.0.1:1", "pid": os.getpid()})
    time.sleep(300)


def shared_memory():
    """Act as a stage that creates named shared memory and hangs without removing it."""
    file = Path("/dev/shm") / os.environ["TINY_SHARED_MEMORY"]
    with file.open("w+b") as stream:
        stream.truncate(4096)
        shared = mmap.mmap(stream.fileno(), 4096)
        shared[:1] = b"x"  # says that it is mapped: until then it is no process's
        time.sleep(300)
        shared.close()


def known_error():
    (WORK / "error.json").write_text(json.dumps({"error": "DataError", "message": "row 3 has no messages"}))
    sys.exit(5)


def quote_secret():
    """Act as a stage that fails with an error message in which a secret of its environment occurs."""
    message = f"the server refused {os.environ['OWN_SECRET']}"
    (WORK / "error.json").write_text(json.dumps({"error": "ServerError", "message": message}))
    sys.exit(1)


def print_secret():
    print(f"it was {os.environ['OWN_SECRET']} that it tried", flush=True)
    os.kill(os.getpid(), signal.SIGKILL)


def bug():
    print("Traceback: something of ours", flush=True)
    (WORK / "error.json").write_text(json.dumps({"error": "KeyError", "message": "'x'"}))
    sys.exit(70)


def deaths():
    """Act as a stage of ten steps that is killed once before each of the steps in TINY_DEATHS (such as `3,5`)."""
    checkpoints, died = WORK / "scratch" / "checkpoints", WORK / "scratch" / "died"
    checkpoints.mkdir(parents=True, exist_ok=True)
    died.touch()
    latest = max((int(path.name.removeprefix("step-")) for path in checkpoints.iterdir()), default=0)
    for step in range(latest + 1, 11):
        due = os.environ["TINY_DEATHS"].split(",")[len(died.read_text()) :]
        if due and due[0] == str(step):
            died.write_text(died.read_text() + ".")
            os.kill(os.getpid(), signal.SIGKILL)
        if step % 2 == 0:
            (checkpoints / f"step-{step}").mkdir()
    result(metrics={"first_step": float(latest + 1)})


def hungry():
    """Act as a stage that allocates more memory than the test's memory cgroup allows."""
    bytearray(1 << 30)
    result()


def killed():
    print("the last thing it said", flush=True)
    os.kill(os.getpid(), signal.SIGKILL)


def asked_to_end():
    os.kill(os.getpid(), signal.SIGTERM)


def server_killed():
    """Act as a stage that fails because its server was killed while it started."""
    message = {"error": "ServerError", "message": "the server ended before it was ready", "died": True}
    (WORK / "error.json").write_text(json.dumps(message))
    sys.exit(9)


def kills_server():
    """Act as a stage that kills its upstream serve stage's server and asks for a retry, or succeeds if it has none."""
    leases = json.loads((WORK / "config.json").read_text())["leases"].values()
    for lease in leases:
        os.kill(lease["pid"], signal.SIGKILL)
        (WORK / "error.json").write_text(json.dumps({"error": "TransientError", "message": "it went away"}))
        sys.exit(75)
    result(metrics={"had_server": 0.0})


def rank_killed():
    (WORK / f"rank{os.environ['RANK']}").touch()
    if os.environ["RANK"] == "1":
        time.sleep(0.5)
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(300)


def transient():
    sys.exit(75)


def transient_once():
    """Act as a stage that asks for a retry when first run (exit code 75), and succeeds when run again."""
    tried = WORK / "scratch" / "tried"
    if tried.exists():
        return result()
    tried.parent.mkdir(exist_ok=True)
    tried.touch()
    sys.exit(75)


def silent():
    """Act as a stage that exits with code 0 but leaves no result."""


def check():
    """Act as the process that checks a stage's inputs before it runs, and report no problem."""
    (WORK / "findings.json").write_text("{}")
    result()


if json.loads((WORK / "config.json").read_text())["kind"] == "check":
    check()
else:
    globals()[os.environ["TINY"]]()
