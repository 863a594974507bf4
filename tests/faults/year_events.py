"""Events before certain nights of the simulated year: upgrades, backups, a month of stopped servers, full disks."""

import json
import shutil
import subprocess
import threading
import time
from collections.abc import Callable
from datetime import UTC, datetime, timedelta

from disks import filled
from refreshes import LIFECYCLE, ROOT
from test_killed_at_random import RECIPE, made
from year_kills import Kill, carry_out
from year_nights import Life, Year
from year_operator import NAME, until

EARLIER = ("a2e81ef", "62a051a", "eeeaaca")
"""Commits of earlier versions of this project that the lifecycle home is upgraded from, oldest first. The first is
older than reports and Prefect states of promotion decisions; the second is older than storing artifacts that a check
rejects; the third is older than lifecycle homes that recognize copies of themselves."""
CHAIN = "chain"
TRAINED_WITHIN_S = 120.0
FULL_FOR_S = 20.0
MONTH = timedelta(days=30)
AUTUMN = datetime(2027, 10, 31, 1, tzinfo=UTC)
"""End of daylight saving time in Berlin, when a nightly schedule's time occurs twice."""
Deed = Callable[[Year], threading.Thread | None]


def events(count: int) -> dict[int, list[tuple[str, Deed]]]:
    """Return the events of a simulated year by the number of the night before which they happen."""
    middle = count // 2
    return {
        **{number + 2: [(f"upgrade {number + 1}", upgrade(commit))] for number, commit in enumerate(following())},
        count // 5 + 3: [("full disk", fill_the_disk)],
        count // 4 + 3: [("copy", copy)],
        count // 4 + 5: [("restore", restore)],
        **{number: [("real chain", run_the_chain)] for number in (count // 3 + 3, count * 2 // 3, count * 9 // 10)},
        middle + 2: [("absence", stay_away)],
        count * 3 // 4: [("full disk", fill_the_disk)],
    }


def following() -> list[str | None]:
    """Return the commits to which the simulated year upgrades the project's code; None is the checked-out code."""
    return [*EARLIER[1:], None]


def upgrade(commit: str | None) -> Deed:
    """Return an event that upgrades the simulated lifecycle home: servers stop, the code is switched, servers start."""

    def deed(year: Year) -> None:
        year.home.does("down")
        use(year, commit)
        year.home.does("up")

    return deed


def use(year: Year, commit: str | None) -> None:
    """Make the lifecycle home's processes run the code of a commit, or, if None, the checked-out code."""
    folder = ROOT
    if commit:
        folder = year.home.folder.parent / f"code-{commit}"
        folder.mkdir()
        archive = subprocess.run(["git", "archive", commit, "flows", "stages"], cwd=ROOT, capture_output=True)
        assert archive.returncode == 0, f"git fetch --unshallow: {archive.stderr.decode()}"
        subprocess.run(["tar", "-x"], cwd=folder, input=archive.stdout, check=True)
    year.home.environment["PYTHONPATH"] = str(folder)


def fill_the_disk(year: Year) -> threading.Thread:
    """Fill the lifecycle home's disk for some seconds when the next refresh is due."""
    disk = year.home.folder.parent

    def fill() -> None:
        due = year.nights[-1].number + 1
        until(lambda: year.nights[-1].number == due, "the night begins")
        with filled(disk):
            time.sleep(FULL_FOR_S)

    thread = threading.Thread(target=fill)
    thread.start()
    return thread


def copy(year: Year) -> None:
    """Stop the lifecycle home's servers, back the home up with `cp`, and start the servers again."""
    year.versions_of_backup = dict(year.lives[-1].versions)
    year.home.does("down")
    subprocess.run(["cp", "-a", year.home.folder, year.backup], check=True)
    year.home.does("up")


def restore(year: Year) -> None:
    """Restore the home from its backup as documented, and resume its schedule, which a copy pauses; keys are new."""
    year.lives[-1].until_s = time.monotonic()
    year.lives.append(Life(versions=dict(year.versions_of_backup)))
    year.home.does("down")
    shutil.rmtree(year.home.folder)
    subprocess.run(["cp", "-a", year.backup, year.home.folder], check=True)
    shutil.rmtree(year.backup)
    year.home.does("up")
    schedules = json.loads(year.home.does("schedules", "--json"))["schedules"]
    assert [schedule["paused"] for schedule in schedules] == [True], schedules
    year.home.does("schedules", "resume", NAME)
    year.unit.restart()


def stay_away(year: Year) -> None:
    """Stop the home's servers, but for the champion's, for a month or more, until shortly before clocks go back."""
    year.home.does("down")
    year.clock.set(max(year.clock.now() + MONTH, AUTUMN - timedelta(days=4)))
    year.home.does("up")
    until(year.home.is_quiet, "what was missed is over")


def run_the_chain(year: Year) -> None:
    """Run real SFT, DPO, AWQ and vLLM stages; later repeat them with one rank killed, and compare the artifacts."""
    file = year.home.folder.parent / f"{CHAIN}.yaml"
    command = ["rerun", str(file), "--stage", "sft"] if file.exists() else ["run", str(file)]
    file.write_text(json.dumps({"name": CHAIN, "stages": RECIPE}))
    environment = {name: value for name, value in year.home.environment.items() if name != "LIFECYCLE_VLLM"}
    environment["TORCHINDUCTOR_CACHE_DIR"] = str(file.with_name("torch"))  # which torch keeps, for the user
    killer = None
    if command[0] == "rerun":
        killer = carry_out(Kill(0, "rank", 1.0), str(year.home.folder), year.chance, TRAINED_WITHIN_S)
    done = subprocess.run([LIFECYCLE, *command, "--json"], env=environment, capture_output=True, text=True)
    if killer:
        killer.join()
    assert done.returncode == 0, f"seed {year.seed}, night {len(year.nights) + 1}: {done.stderr}{done.stdout}"
    year.chains.append(made(year.home, json.loads(done.stdout)))
    assert year.chains[-1] == year.chains[0], f"seed {year.seed}, night {len(year.nights) + 1}: other bytes"
