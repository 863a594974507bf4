"""Runner of the nightly tests, which take too long for `make test`. They are divided into parts that run separately.

    python tests/nightly/parts.py [PART …]     run these parts, or all, as `make nightly` does
    python tests/nightly/parts.py --stale      name the parts that are due

Each part is a run of pytest over the tests that are marked `nightly` in some files, and says what it proved. On which
commit and day it last passed is kept in `stamps.json` here, which `tests/README.md` shows; the exit code is 1 when a
part failed. All take at most an hour on two cores, but for the year, which takes two.
"""

import json
import os
import subprocess
import sys
import time
from dataclasses import dataclass
from datetime import UTC, date, datetime
from pathlib import Path
from xml.etree import ElementTree

ROOT = Path(__file__).parents[2]
STAMPS = Path(__file__).with_name("stamps.json")
RESULTS = ROOT / "build" / "nightly"
"""Folder with the JUnit report of each part's last run, named after the commit, for `tests/matrix.py`."""
PAGE = ROOT / "tests" / "README.md"
FRESH_DAYS = 7


@dataclass(frozen=True)
class Part:
    """Part of the nightly tests that runs separately: test files or folders, without those listed in `but`.

    makes: targets of the Makefile that install what only these tests need.
    """

    name: str
    proves: str
    tests: tuple[str, ...]
    but: tuple[str, ...] = ()
    makes: str = ""

    @property
    def report(self) -> Path:
        """Path of the JUnit report of this part's last run."""
        return RESULTS / f"{self.name.replace(' ', '-')}.xml"

    def command(self, commit: str) -> list[str]:
        left_out = [f"--ignore=tests/{path}" for path in self.but]
        # The last -m counts: that of pyproject.toml leaves these tests out.
        command = [sys.executable, "-m", "pytest", "-m", "nightly", "--durations=10", f"--junitxml={self.report}"]
        for setting in ("junit_family=xunit1", f"junit_suite_name={commit}"):
            command += ["--override-ini", setting]
        return [*command, *left_out, *(f"tests/{path}" for path in self.tests)]


RANDOM, SLURM = "faults/test_killed_at_random.py", "faults/test_slurm_faults.py"
YEAR, VIDEOS = "faults/test_year.py", "unit/stages/kinds/train/test_videos.py"
SOUNDS = "unit/stages/kinds/train/test_sounds.py"
WHEEL, RAY, OPENENV = "nightly/test_wheel.py", "pipeline/test_ray.py", "pipeline/test_openenv.py"
PARTS = (
    Part("year", "365 nightly refreshes on a clock of their own lose nothing and need no hand", (YEAR,)),
    Part("matrices", "every layout, method and adapter of both engines learns what Transformers learns", ("parity",)),
    Part("fake devices", "a step of every layout runs on fake GPUs, with the bytes of the formulas", ("fake_gpu",)),
    Part(
        "kills", "every kill point of a refresh, a server, a promotion is survived", ("faults",), (YEAR, RANDOM, SLURM)
    ),
    Part("random kills", "three refreshes killed at random end with the bytes of an undisturbed one", (RANDOM,)),
    Part("slurm", "jobs that are lost, preempted or out of time go on", (SLURM,)),
    Part("ray", "jobs of a Ray cluster end, are stopped, and outlive their node", (RAY,), makes="ray"),
    Part(
        "pipelines",
        "recipes that stand on the quickstart; servers of adapters, drafts, new weights",
        ("pipeline", "unit/stages/kinds/curate"),
        (RAY, OPENENV),
    ),
    Part(
        "families",
        "tiny models of every family of the zoo go through what the table of families shows",
        ("zoo", VIDEOS, SOUNDS, "unit/stages/engines/test_bf16.py", "unit/stages/serving/vllm"),
    ),
    Part(
        "harnesses",
        "EvalScope scores question sets with pictures; BFCL judges calls as vLLM reads; verifiers acts, OpenEnv trains",
        ("unit/stages/kinds/evaluate", "unit/stages/rollouts", OPENENV),
        makes="evalscope bfcl openenv verifiers",
    ),
    Part(
        "trackers",
        "TensorBoard, Weights & Biases and SwanLab get the curves of the ledger",
        ("unit/flows/tracking",),
        makes="trackers",
    ),
    Part(
        "agents",
        "their client plans and reads refreshes",
        ("unit/flows/cli",),
        makes="mcp",
    ),
    Part(
        "deployment",
        "SkyPilot takes a rendered task, Prometheus Operator a monitor",
        ("unit/flows/launch",),
        makes="skypilot",
    ),
    Part(
        "object storage",
        "homes share Azure's storage as S3",
        ("unit/flows/store",),
        makes="azurite",
    ),
    Part(
        "images",
        "the images are built, and run a refresh and the servers of a team",
        ("images",),
        makes="buildah",
    ),
    Part("release", "a wheel ends with a champion where there is no checkout", (WHEEL,)),
    Part("homes", "homes copied, moved, killed in their parts while they run", ("nightly",), (WHEEL,)),
)


def main(names: list[str]) -> int:
    """Run the named parts of the nightly tests, or all, and return the exit code."""
    if names == ["--stale"]:
        print(stale_parts())
        return 0
    if unknown := set(names) - {part.name for part in PARTS}:
        sys.exit(f"no such part: {', '.join(sorted(unknown))}; there are {', '.join(part.name for part in PARTS)}")
    commit = checked_out()
    chosen = [part for part in PARTS if part.name in names or not names]
    failed = [part for part in chosen if not passes(part, commit)]
    for part in chosen:
        how = "FAILED" if part in failed else f"{stamps()[part.name]['passed']} tests passed"
        print(f"{part.name}: {part.proves}: {how} on {short(commit)}")
    write_page()
    return 1 if failed else 0


def passes(part: Part, commit: str) -> bool:
    """Run one part of the nightly tests, and record date and commit if all pass; return whether they passed."""
    started_s = time.monotonic()
    RESULTS.mkdir(parents=True, exist_ok=True)
    # A stamp stands for the whole part, so this must not make the year shorter.
    environment = {name: value for name, value in os.environ.items() if name != "YEAR_NIGHTS"}
    if part.makes and subprocess.run(["make", *part.makes.split()], cwd=ROOT, check=False).returncode:
        return False
    if subprocess.run(part.command(commit), cwd=ROOT, env=environment, check=False).returncode:
        return False
    suites = list(ElementTree.parse(part.report).iter("testsuite"))
    skipped = sum(int(suite.get("skipped", 0)) for suite in suites)
    stamp = {
        "commit": short(commit),
        "day": f"{datetime.now(UTC):%Y-%m-%d}",
        "minutes": round((time.monotonic() - started_s) / 60, 1),
        "passed": sum(int(suite.get("tests", 0)) for suite in suites) - skipped,
        "skipped": skipped,
    }
    STAMPS.write_text(json.dumps({**stamps(), part.name: stamp}, indent=2) + "\n")
    return True


def stamps() -> dict[str, dict[str, object]]:
    """Return the date and the commit at which each part of the nightly tests last passed, by the part's name."""
    return json.loads(STAMPS.read_text()) if STAMPS.exists() else {}


def stale_parts() -> str:
    """Return a sentence that names the nightly parts that never passed, or not within the last week."""
    today = datetime.now(UTC).date()
    days = {name: date.fromisoformat(str(stamp["day"])) for name, stamp in stamps().items()}
    due = [part.name for part in PARTS if part.name not in days or (today - days[part.name]).days > FRESH_DAYS]
    named = [f"{name} ({f'last passed on {days[name]}' if name in days else 'never passed'})" for name in due]
    return f"due by `make nightly`: {', '.join(named)}" if named else "no nightly part is due"


def table() -> str:
    """Return a Markdown table of the nightly parts, with what they prove and when they last passed."""
    rows = [
        "| part | proves | last passed on | day | minutes | tests, skipped |",
        "| --- | --- | --- | --- | ---: | ---: |",
    ]
    for part in PARTS:
        stamp = stamps().get(part.name)
        cells = [part.name, part.proves, "–", "–", "–", "–"]
        if stamp:
            counts = f"{stamp['passed']}, {stamp['skipped']}"
            cells[2:] = [f"`{stamp['commit']}`", str(stamp["day"]), str(stamp["minutes"]), counts]
        rows.append(f"| {' | '.join(cells)} |")
    return "\n".join(rows)


def write_page() -> None:
    """Update the documentation page that shows when each nightly part last passed, as `make docs` does."""
    subprocess.run([sys.executable, ROOT / "tests" / "pages.py", "--page", PAGE], cwd=ROOT, check=True)


def checked_out() -> str:
    """Return the tested commit, 40 digits: the checked-out one, with `-dirty` behind it if files differ from it."""

    def git(*arguments: str) -> str:
        return subprocess.run(["git", *arguments], cwd=ROOT, check=True, capture_output=True, text=True).stdout.strip()

    changed = [
        line
        for line in git("status", "--porcelain").splitlines()
        if not line.endswith(("stamps.json", "tests/README.md"))
    ]
    return git("rev-parse", "HEAD") + ("-dirty" if changed else "")


def short(commit: str) -> str:
    """Return the first digits of a commit, and its mark."""
    return commit[:8] + commit[40:]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
