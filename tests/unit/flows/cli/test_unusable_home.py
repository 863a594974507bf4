"""A lifecycle home that cannot be written to is reported in one line by each command that needs it, and by `doctor`."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from stages.core.errors import ResourceError

LIFECYCLE = Path(sys.executable).with_name("lifecycle")
RECIPE = "stages:\n  rows: {kind: download, dataset: builtin/addition}\n"
HOMES = ("/sys/lifecycle", "/dev/null/home")
"""Paths where not even root can create a folder: in a system file system, and below a file."""


@pytest.mark.parametrize("home", HOMES)
@pytest.mark.parametrize("command", [["run", "recipe.yaml"], ["up"], ["notify", "list"]], ids=" ".join)
def test_it_is_no_traceback(tmp_path, home, command):
    (tmp_path / "recipe.yaml").write_text(RECIPE)
    done = lifecycle(tmp_path, home, *command)
    assert done.returncode == ResourceError.exit_code, done.stderr
    assert f"using {home}" in done.stderr
    assert "set LIFECYCLE_HOME to a folder that you may write to" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("home", HOMES)
def test_the_doctor_knows_that_a_run_cannot_work_there(tmp_path, home):
    done = lifecycle(tmp_path, home, "doctor", "--json")
    found = json.loads(done.stdout)
    assert (done.returncode, found["can_run"]) == (ResourceError.exit_code, False)
    (finding,) = [one for one in found["findings"] if one["subject"] == "home"]
    assert (finding["state"], finding["found"].startswith(f"{home} cannot be written to: ")) == ("missing", True)


def lifecycle(folder, home, *arguments):
    named = ("PREFECT_API_URL", "MLFLOW_TRACKING_URI")
    environment = {name: value for name, value in os.environ.items() if name not in named}
    environment["LIFECYCLE_HOME"] = home
    return subprocess.run([LIFECYCLE, *arguments], cwd=folder, env=environment, text=True, capture_output=True)
