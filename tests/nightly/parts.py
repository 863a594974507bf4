"""Tests that take too long for `make test`, a file at a time: `make nightly`, or

    python tests/nightly/parts.py [FILE …]

The year comes first. Which file last passed on which commit, and how long that took, is kept in `build/nightly.json`;
the exit code is 1 when a file failed.
"""

import json
import subprocess
import sys
import time
from datetime import UTC, datetime
from pathlib import Path
from xml.etree import ElementTree

ROOT = Path(__file__).parents[2]
PASSED = ROOT / "build" / "nightly.json"
YEAR = ROOT / "tests" / "faults" / "test_year.py"


def main(files: list[Path]) -> int:
    parts = files or [YEAR, *sorted((ROOT / "tests" / "nightly").glob("test_*.py"))]
    commit = checked_out()
    failed = [part for part in parts if not passes(part, commit)]
    for part, last in noted().items():
        how = f"in {last['seconds']} s, {last['skipped']} skipped"
        print(f"{part}: last passed on {last['commit']}, {last['time']}, {how}")
    for part in failed:
        print(f"{name_of(part)}: failed on {commit}")
    return 1 if failed else 0


def passes(part: Path, commit: str) -> bool:
    """Run the tests of one file; note that they passed."""
    started_s = time.monotonic()
    results = PASSED.with_suffix(".xml")
    # The last -m counts: that of pyproject.toml leaves these tests out.
    command = [sys.executable, "-m", "pytest", "-m", "", f"--junitxml={results}", part]
    done = subprocess.run(command, cwd=ROOT, check=False)
    if done.returncode == 0:
        seconds, now = round(time.monotonic() - started_s), f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC"
        skipped = sum(int(suite.get("skipped", 0)) for suite in ElementTree.parse(results).iter("testsuite"))
        last = {name_of(part): {"commit": commit, "time": now, "seconds": seconds, "skipped": skipped}}
        PASSED.write_text(json.dumps({**noted(), **last}, indent=2))
    return done.returncode == 0


def noted() -> dict[str, dict[str, object]]:
    """Return what is known of each file that has ever passed here."""
    return json.loads(PASSED.read_text()) if PASSED.exists() else {}


def checked_out() -> str:
    """Return the commit that is tested."""

    def git(*arguments: str) -> str:
        return subprocess.run(["git", *arguments], cwd=ROOT, check=True, capture_output=True, text=True).stdout.strip()

    return git("rev-parse", "--short", "HEAD") + (" with changes" if git("status", "--porcelain") else "")


def name_of(part: Path) -> str:
    return str(part.resolve().relative_to(ROOT))


if __name__ == "__main__":
    sys.exit(main([Path(argument) for argument in sys.argv[1:]]))
