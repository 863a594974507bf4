"""`lifecycle logs` chooses the right log file; following a log shows every line and ends with the stage."""

import threading
import time
from types import SimpleNamespace

import pytest
from click.testing import CliRunner

from flows.cli import logs as module
from flows.cli.logs import find_log
from flows.cli.refresh_commands import logs
from flows.ledger.events import AttemptBegan, RefreshEnded
from flows.ledger.process_identity import ProcessIdentity
from flows.ledger.refreshes import end_of, ledger_of
from stages.core.errors import StoreError
from tests.beginnings import beginning


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("LIFECYCLE_HOME", str(tmp_path))
    return tmp_path


def begin(home, refresh, number=1, process=None):
    """Write the event log (ledger) of a refresh whose stage `sft` is running, and create its work folder."""
    ledger = ledger_of(refresh)
    work = home / "work" / f"{refresh}-{number}"
    work.mkdir(parents=True)
    if number == 1:
        ledger.append(beginning(home, {"sft": "train"}, refresh, "tiny", process=process or ProcessIdentity.own()))
    tags = {"recipe": "tiny", "kind": "train", "version": "0123456789ab"}
    ledger.append(AttemptBegan(stage="sft", number=number, work=work, first_byte=0, params={}, tags=tags))
    return ledger, work


def end(ledger, number, outcome, **fields):
    ledger.append(end_of(ledger.read().attempts[f"sft-{number}"], outcome, **fields))


def test_the_latest_attempt_of_the_latest_refresh_is_read(home):
    first, work = begin(home, "a-1")
    (work / "log.txt").write_text("of the first refresh\n")
    end(first, 1, "failed")
    second, work = begin(home, "b-1")
    (work / "log.txt").write_text("the first attempt\n")
    end(second, 1, "failed")
    _, work = begin(home, "b-1", number=2)
    (work / "log.txt").write_text("the second attempt\n")

    assert "".join(find_log("sft", None).read(follow=False)) == "the second attempt\n"
    assert "".join(find_log("sft", "a-").read(follow=False)) == "of the first refresh\n"


def test_following_reads_on_into_the_store_and_ends_with_the_attempt(home):
    ledger, work = begin(home, "a-1")
    (work / "log.txt").write_bytes("step 1: ¼".encode()[:-1])  # half a letter is there
    read = []
    follower = threading.Thread(target=lambda: read.extend(find_log("sft", None).read(follow=True)))
    follower.start()
    while not read:
        time.sleep(0.01)

    with (work / "log.txt").open("ab") as stream:
        stream.write("¼".encode()[-1:] + b"\nstep 2\n")
    work.rename(home / "artifact")
    end(ledger, 1, "finished", folder=home / "artifact")
    follower.join(300)

    assert not follower.is_alive()
    assert "".join(read) == "step 1: ¼\nstep 2\n"
    assert "".join(find_log("sft", None).read(follow=True)) == "step 1: ¼\nstep 2\n"


@pytest.mark.parametrize("moved", [False, True])
def test_a_log_that_is_not_there_yet_or_was_moved_meanwhile_is_waited_for(home, monkeypatch, moved):
    ledger, work = begin(home, "a-1")
    waits = threading.Event()
    monkeypatch.setattr(module, "time", SimpleNamespace(sleep=lambda _: waits.set()))
    read = []
    log = find_log("sft", None)
    follower = threading.Thread(target=lambda: read.extend(log.read(follow=True)))
    follower.start()
    waits.wait()

    folder = work.rename(home / "artifact") if moved else work
    (folder / "log.txt").write_text("step 1\n")
    end(ledger, 1, "finished", folder=folder)
    follower.join()

    assert "".join(read) == "step 1\n"


def test_following_ends_when_the_refresh_was_killed(home):
    gone = ProcessIdentity.own().model_copy(update={"pid": 2**22 - 1})
    _, work = begin(home, "a-1", process=gone)
    (work / "log.txt").write_text("and then\n")

    assert "".join(find_log("sft", None).read(follow=True)) == "and then\n"


def test_an_empty_log_is_said_to_be_empty(home):
    _, work = begin(home, "a-1")
    (work / "log.txt").touch()
    done = CliRunner().invoke(logs, ["sft"])
    assert done.stdout == ""
    assert f"printed nothing; metrics and events of it are in {work}" in done.stderr


def test_what_is_not_there_is_named(home):
    ledger, _ = begin(home, "a-1")
    ledger.append(RefreshEnded(state="failed", seconds=1.0))

    with pytest.raises(StoreError, match=r"log\.txt: No such file"):
        list(find_log("sft", None).read(follow=False))
    with pytest.raises(StoreError, match="refresh a-1 has not tried to build it"):
        find_log("dpo", "a-1")
    with pytest.raises(StoreError, match="looking for refresh b-1"):
        find_log("sft", "b-1")
    with pytest.raises(StoreError, match="looking for `sftt`"):
        find_log("sftt", None)
