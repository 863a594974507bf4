"""The wheel of a release ends with a champion where there is no checkout, by the commands of `deploy/README.md`."""

import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from stages.core.supervised import SupervisedProcess
from tests.serving import wait_for

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(3600)]

ROOT = Path(__file__).parents[2]
OF_THE_NETWORK = re.compile(r"(PIP|UV|SSL|REQUESTS)_.*|.*_proxy", re.IGNORECASE)
"""Variables by which this machine reaches its package index; the bare environment has no others of the tests."""
END = """
.venv/bin/lifecycle champion adder --json > champion.json
.venv/bin/lifecycle down
"""


@pytest.fixture
def wheel(tmp_path):
    """Release the checked-out commit from a clone, where it has the tag of its version."""
    clone = tmp_path / "clone"
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    subprocess.run(["git", "clone", "--quiet", ROOT, clone], check=True)
    subprocess.run(["git", "tag", "--force", f"v{version}"], cwd=clone, check=True)
    (clone / ".venv").symlink_to(sys.prefix)  # for its uv
    subprocess.run(["make", "release"], cwd=clone, check=True)
    (built,) = (clone / "dist").glob("*.whl")
    return built


def test_the_quickstart_of_a_wheel_ends_with_a_champion(wheel, tmp_path):
    page = (ROOT / "deploy" / "README.md").read_text()
    (block,) = (block for block in re.findall(r"^```console\n(.+?)^```", page, re.S | re.M) if "_lifecycle-*" in block)
    commands = re.findall(r"^\$ (.+)$", block, re.M)
    assert len(commands) == 4
    (home := tmp_path / "home").mkdir()
    (folder := tmp_path / "work").mkdir()
    shutil.copy(wheel, folder)
    known = {name: value for name, value in os.environ.items() if OF_THE_NETWORK.fullmatch(name)}
    python = Path(sys.executable).resolve().parent
    environment = {"PATH": f"{python}:{os.defpath}", "HOME": str(home), "LANG": "C.UTF-8", **known}
    with (log := tmp_path / "log.txt").open("wb") as output:
        process = SupervisedProcess(
            ["sh", "-exc", "\n".join([*commands, END])], environment=environment, output=output, folder=folder
        )
    try:
        wait_for(lambda: process.poll() is not None, 3500)
    finally:
        process.stop()
    said = log.read_text()
    print(said)
    assert process.poll() == 0
    assert json.loads((folder / "champion.json").read_text())["version"]
    assert not re.search(r"\bmake \w", said)  # there is no Makefile
