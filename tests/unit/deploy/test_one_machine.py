"""Systemd services name existing commands and valid settings; the Slurm recipe plans and uses all of its nodes."""

import configparser
import shutil
import subprocess
from pathlib import Path

import pytest

from flows.cli.main import cli
from flows.planning.plan import plan
from flows.recipe.recipe import load_recipe
from flows.store.record import Index

DEPLOY = Path(__file__).parents[3] / "deploy"
UNITS = sorted((DEPLOY / "systemd").glob("*.service"))
INSTALLED = "/opt/llm-lifecycle/.venv/bin/lifecycle"


@pytest.fixture(params=UNITS, ids=lambda path: path.name)
def service(request):
    unit = configparser.ConfigParser(interpolation=None)
    unit.optionxform = str
    unit.read(request.param)
    return unit["Service"]


def test_a_service_is_a_command_that_there_is_and_says_to_systemd_that_it_lives(service):
    program, command, *arguments = service["ExecStart"].split()
    assert program == INSTALLED
    options = {name for parameter in cli.commands[command].params for name in parameter.opts}
    assert {argument for argument in arguments if argument.startswith("--")} <= options
    assert (service["Type"], service["Restart"]) == ("notify", "always")
    # It is silent while it starts a process for a record, or ends what a server left.
    assert float(service["WatchdogSec"]) >= 60
    # What a killed supervisor of servers kept goes on; that of a champion leaves nothing that could.
    assert service["KillMode"] == ("process" if command == "up" else "mixed")


def test_a_service_may_write_its_home_and_keeps_it_to_itself(service):
    home = Path(service["Environment"].split()[0].removeprefix("LIFECYCLE_HOME="))
    assert home.is_relative_to(service["ReadWritePaths"])
    assert service["ProtectSystem"] == "strict"
    assert service["UMask"] == "0077"


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="there is no systemd here")
@pytest.mark.parametrize("unit", UNITS, ids=lambda path: path.name)
def test_systemd_knows_every_setting_of_a_service(tmp_path, unit):
    """`systemd-analyze`, in a temporary root with the program to start, accepts our services' settings."""
    program = tmp_path / INSTALLED[1:]
    program.parent.mkdir(parents=True)
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    units = tmp_path / "etc/systemd/system"
    units.mkdir(parents=True)
    text = unit.read_text().replace("/opt/llm-lifecycle", str(tmp_path / "opt/llm-lifecycle"))
    (units / unit.name).write_text(text)
    name = unit.name.replace("@", "@my-model")
    done = subprocess.run(
        ["systemd-analyze", "verify", "--recursive-errors=no", "--man=no", str(units / name)],
        capture_output=True,
        text=True,
    )
    said = [line for line in done.stderr.splitlines() if unit.stem in line]
    assert (done.returncode, said) == (0, [])


@pytest.mark.parametrize("path", sorted((DEPLOY / "slurm").glob("*.yaml")), ids=lambda path: path.stem)
def test_a_recipe_for_slurm_plans_and_fills_its_nodes(path):
    recipe = load_recipe(path)
    planned = plan(recipe, {stage: {"revision": "recorded"} for stage in recipe.stages}, Index(()))
    assert {stage.action for stage in planned.stages.values()} == {"run"}
    trained = [config for config in recipe.stages.values() if config.kind == "train"]
    assert trained
    for config in trained:
        execution = config.execution
        assert execution.launcher == "slurm"
        assert config.layout.world_size == execution.nodes * execution.slurm.gpus_per_node
        assert execution.threads * execution.slurm.gpus_per_node <= execution.slurm.cpus_per_node
