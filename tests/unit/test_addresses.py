"""Module and function names that are stored or used outside the process may not change.

Deployments in Prefect's database, compose files, manifests, units of systemd, queued Slurm jobs and running processes
of an earlier version name them: a module that moves breaks what was started, or queued, before the upgrade.
"""

import ast
import re
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
COMMAND_LINES = {
    "flows.champion.decide": "the worker, for each decision that comes by HTTP",
    "flows.champion.key": "plans of every version that runs beside this one",
    "flows.champion.promotion": "the stage process of a promotion, and its hook",
    "flows.launch.away_task": "pods without a shared volume",
    "flows.launch.agent": "what watches a job of a cluster; it outlives the refresh",
    "flows.launch.node_task": "Jobs of Kubernetes, and steps of Slurm jobs that are queued",
    "flows.launch.slurm_batch": "Slurm jobs that are queued",
    "flows.servers.guarded": "deploy/compose.yaml, and the supervisor",
    "flows.servers.keyed": "deploy/compose.yaml, and operators",
    "flows.servers.records": "the supervisor",
    "flows.servers.supervisor": "`lifecycle up`, which also finds a running one by this name",
    "flows.service.worker": "deploy/compose.yaml, and the supervisor",
    "flows.tracking.shipper": "a refresh, which it outlives",
    "flows.tracking.copies": "a refresh, which it outlives for ten minutes at most",
    "stages": "every stage process",
    "stages.core.pattern_program": "asked about regular expressions",
    "stages.data.media.video_program": "asked about videos",
    "stages.data.template_program": "asked about chat templates",
    "stages.harnesses.installation": "the Makefile",
    "stages.harnesses.bfcl.program": "asked for a benchmark's questions and verdicts",
    "stages.kinds.download.builtin.held_out": "people who write configs/tasks/addition.jsonl again",
    "stages.kinds.serve": "`lifecycle serve`",
    "stages.models.walk_program": "asked about the layers of a model",
    "stages.parallel.ranks": "launchers, in Slurm jobs that are queued too",
    "stages.rollouts.environments.agent_program": "asked to run a person's agent program",
    "stages.rollouts.environments.python_program": "asked to run a person's environment",
    "stages.rollouts.environments.reasoning_gym_program": "asked for a task's rows and scores",
    "stages.rewards.code_program": "asked to run code",
    "stages.rewards.json_schema_program": "asked about JSON",
    "stages.rewards.math_program": "asked about formulas",
    "stages.rewards.python_program": "asked to run a person's reward",
    "stages.serving.proxy_program": "pods of servers",
}
"""Callers of each program run by `python -m MODULE`, by module. One run over a pipe may be renamed with its caller."""
GONE = {"stages.download.builtin.held_out"}
"""Modules that no longer exist, but are named in configs/tasks/addition.yaml, whose content may not change."""
ENTRYPOINT = "flows.running.refresh.refresh"
PARAMETERS = ["recipe", "overrides", "until", "force"]
"""Parameter names of Prefect deployments, for which existing deployments and scheduled runs hold values."""
SETTINGS = {
    *("LIFECYCLE_BFCL", "LIFECYCLE_COMPLETE", "LIFECYCLE_DATABASE_PASSWORD_FILE", "LIFECYCLE_EVALSCOPE"),
    *(
        "LIFECYCLE_ATTENTION",
        "LIFECYCLE_FIRST_MACHINE",
        "LIFECYCLE_HARDWARE",
        "LIFECYCLE_HOME",
        "LIFECYCLE_LLAMA_CPP",
        "LIFECYCLE_LMDEPLOY",
    ),
    *("LIFECYCLE_RENDEZVOUS_FILE", "LIFECYCLE_SERVERS_KEY", "LIFECYCLE_SERVERS_KEY_FILE", "LIFECYCLE_SGLANG"),
    *("LIFECYCLE_STAGE", "LIFECYCLE_STAGE_TOKEN", "LIFECYCLE_LOG", "LIFECYCLE_MLFLOW", "LIFECYCLE_TRACKERS"),
    *("LIFECYCLE_VLLM", "LIFECYCLE_PROXY_KEY_FILE", "LIFECYCLE_REASONING_GYM"),
}
"""Environment variables that people and processes of earlier versions set, so that they must keep their names."""
STARTED = re.compile(r"""-m["',\s]+((?:flows|stages)\b[\w.]*)""")
QUOTED = re.compile(r"""["'](?:flows|stages)\.""")
ADDRESS = re.compile(r"(?:flows|stages)(?:\.\w+)+")


def texts():
    """Yield name and content of every file that may start one of our modules by name."""
    for folder in ("flows", "stages", "deploy", "configs"):
        for file in sorted((ROOT / folder).rglob("*")):
            if file.is_file() and "__pycache__" not in file.parts and file.suffix not in (".jsonl", ".png"):
                yield str(file.relative_to(ROOT)), file.read_text()
    for name in ("Makefile", "README.md", "pyproject.toml"):
        yield name, (ROOT / name).read_text()


def file_of(module):
    """Return the file of a module, as `python -m` or an import finds it, or None if there is no such module."""
    path = ROOT / module.replace(".", "/")
    candidates = (path / "__main__.py", path.with_suffix(".py"), path / "__init__.py")
    return next((file for file in candidates if file.is_file()), None)


def resolves(address):
    """Return whether a dotted address names a module, or a name at the top level of a module."""
    if file_of(address) or (ROOT / address.replace(".", "/")).is_dir():
        return True
    module, _, name = address.rpartition(".")
    file = file_of(module)
    defined = {getattr(node, "name", None) for node in ast.parse(file.read_text()).body} if file else set()
    return name in defined


def strings(text):
    """Yield every string in the source of a Python file that names a package of ours, docstrings included."""
    for node in ast.walk(ast.parse(text)) if QUOTED.search(text) else ():
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value


@pytest.mark.parametrize("module", COMMAND_LINES)
def test_each_module_that_is_started_by_name_can_be(module):
    file = file_of(module)
    assert file, f"{module} moved, but {COMMAND_LINES[module]}: its address must stay"
    names = [node.test for node in ast.parse(file.read_text()).body if isinstance(node, ast.If)]
    assert file.name == "__main__.py" or any(ast.unparse(test) == "__name__ == '__main__'" for test in names)


def test_the_list_of_modules_that_are_started_by_name_is_complete():
    started = {module.rstrip("."): name for name, text in texts() for module in STARTED.findall(text)}
    assert {module: name for module, name in started.items() if module not in COMMAND_LINES.keys() | GONE} == {}


def test_each_address_in_the_code_and_in_deployed_files_resolves():
    found = {(name, said) for name, text in texts() if name.endswith(".py") for said in strings(text)}
    found |= {(name, said) for name, text in texts() if name.startswith("deploy/") for said in ADDRESS.findall(text)}
    addresses = {(name, said) for name, said in found if ADDRESS.fullmatch(said) and not said.endswith((".py", ".md"))}
    assert len(addresses) > 30
    assert sorted((name, said) for name, said in addresses if not resolves(said)) == []


def test_the_flow_has_the_address_and_the_parameters_that_deployments_name():
    module, _, name = ENTRYPOINT.rpartition(".")
    flow = next(node for node in ast.parse(file_of(module).read_text()).body if getattr(node, "name", "") == name)
    assert [argument.arg for argument in flow.args.args] == PARAMETERS
    assert f"entrypoint: {ENTRYPOINT}" in (ROOT / "deploy/prefect.yaml").read_text()


def test_the_variables_of_the_environment_are_the_frozen_ones():
    assert set(re.findall(r"LIFECYCLE_[A-Z_]*[A-Z]", "".join(text for _, text in texts()))) == SETTINGS


def test_every_file_that_is_no_module_is_installed_with_its_package():
    listed = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]
    installed = {}
    for package, patterns in listed.items():
        folder = ROOT / package.replace(".", "/")
        for pattern in patterns:
            installed[f"{package}: {pattern}"] = {file for file in folder.glob(pattern) if file.suffix != ".py"}
    assert [pattern for pattern, files in installed.items() if not files] == []
    needed = {ROOT / name for name, _ in texts() if name.startswith(("flows/", "stages/"))}
    needed = {file for file in needed if file.suffix not in (".py", ".md")}
    assert needed - set().union(*installed.values()) == set()
