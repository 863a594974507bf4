"""The command line starts fast, explains mistakes, and with `--json` prints one object to stdout and nothing else."""

import json
import os
import re
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from flows.cli import doctor
from flows.cli.main import main
from flows.ledger import machine
from stages.core.errors import RecipeError, StoreError, error_classes

LIFECYCLE = Path(sys.executable).with_name("lifecycle")
RECIPE = """
name: small
stages:
  base: {kind: download, model: builtin/qwen3-1m}
  problems: {kind: download, dataset: builtin/addition}
"""


@pytest.fixture
def recipe(tmp_path, monkeypatch):
    monkeypatch.setenv("LIFECYCLE_HOME", str(tmp_path / "home"))
    path = tmp_path / "small.yaml"
    path.write_text(RECIPE)
    return path


@pytest.fixture
def lifecycle(capsys, recipe):
    def run(*arguments):
        with pytest.raises(SystemExit) as ended:
            main([str(argument) for argument in arguments])
        return ended.value.code, *capsys.readouterr()

    return run


def test_help_imports_nothing_heavy_and_answers_at_once():
    # The quickest of three, and of the processor's time: the machine may be busy with something else.
    seconds = []
    for _ in range(3):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        done = subprocess.run([LIFECYCLE, "--help"], capture_output=True, text=True, check=True)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        seconds.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    assert min(seconds) < 0.5
    assert all(
        f"{error.exit_code}  {name}" in done.stdout
        for name, error in error_classes().items()
        if name != "LifecycleError"
    )


def test_planning_imports_neither_prefect_nor_mlflow_nor_torch(recipe):
    program = (
        "import sys\nfrom flows.cli.main import main\n"
        "try:\n    main(['plan', sys.argv[1]])\n"
        "finally:\n    print(*({'prefect', 'mlflow', 'torch', 'rich'} & set(sys.modules)), file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", program, recipe], capture_output=True, text=True, cwd=recipe.parent)
    assert done.stderr.split() == []


def test_plan_says_of_each_stage_what_and_why(lifecycle, recipe):
    code, output, _ = lifecycle("plan", recipe, "--json")
    assert code == 0
    stages = json.loads(output)["stages"]
    assert [(stage["name"], stage["kind"], stage["action"]) for stage in stages] == [
        ("base", "download", "run"),
        ("problems", "download", "run"),
    ]
    assert all(stage["reason"] and len(stage["version"]) == 12 for stage in stages)


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (["--set", "stages.base.modle=x"], RecipeError),
        (["--until", "nowhere"], RecipeError),
        (["--force", "nowhere"], RecipeError),
    ],
)
def test_a_mistake_is_told_without_a_traceback_and_with_its_exit_code(lifecycle, recipe, arguments, error):
    code, output, errors = lifecycle("plan", recipe, *arguments)
    assert (code, output) == (error.exit_code, "")
    assert errors.startswith("RecipeError: ")
    assert "Traceback" not in errors


@pytest.mark.parametrize(
    "command",
    ["run small.yaml", "rerun small.yaml --stage base", "compare small.yaml --stage base --layouts fsdp", "retry none"],
)
def test_what_keeps_a_run_from_starting_has_its_time_as_its_other_lines_have(lifecycle, recipe, monkeypatch, command):
    monkeypatch.chdir(recipe.parent)
    recipe.write_text(RECIPE.replace("model:", "modle:"))
    code, _, errors = lifecycle(*command.split())
    assert code in (RecipeError.exit_code, StoreError.exit_code)
    assert re.fullmatch(r"\d\d:\d\d:\d\d (Recipe|Store)Error: .*\n(\d\d:\d\d:\d\d .*\n)*", errors)


@pytest.mark.parametrize("arguments", [(), ("notify",)])
def test_without_a_command_there_is_help_and_no_error_class(lifecycle, arguments):
    code, output, errors = lifecycle(*arguments)
    assert (code, output) == (2, "")
    assert errors.startswith(" ".join(["Usage: lifecycle", *arguments]))


def test_errors_are_json_too(lifecycle, recipe):
    code, output, _ = lifecycle("run", recipe.parent / "none.yaml", "--json")
    assert code == RecipeError.exit_code
    assert json.loads(output)["error_class"] == "RecipeError"


def test_a_wrong_option_is_json_too(lifecycle, recipe):
    code, output, _ = lifecycle("plan", recipe, "--jsom", "--json")
    assert code == 2
    assert json.loads(output)["error_class"] == "UsageError"


def test_an_adopted_dataset_can_be_shown_verified_and_found_damaged(lifecycle, tmp_path):
    data = tmp_path / "rows.jsonl"
    data.write_text('{"prompt": "1 + 1", "completion": "2"}\n')
    code, output, _ = lifecycle("adopt", data, "--kind", "dataset", "--name", "rows", "--json")
    adopted = json.loads(output)
    assert (code, adopted["state"]) == (0, "built")

    assert adopted["version"] in lifecycle("show")[1]
    assert json.loads(lifecycle("show", adopted["version"][:6], "--json")[1])["folder"] == adopted["artifact"]
    assert json.loads(lifecycle("verify", "--json")[1]) == {"verified": 1, "damaged": []}

    (file,) = Path(adopted["artifact"]).glob("data/*.jsonl")
    file.chmod(0o600)
    file.write_text(file.read_text().replace("2", "3"))
    code, output, _ = lifecycle("verify", "--json")
    assert code == StoreError.exit_code
    assert json.loads(output)["damaged"][0]["artifact"] == adopted["artifact"]


def test_what_is_not_there_cannot_be_adopted_or_shown(lifecycle, tmp_path):
    code, _, errors = lifecycle("adopt", tmp_path / "none.jsonl", "--kind", "dataset", "--name", "rows")
    assert code != 0
    assert "none.jsonl" in errors
    assert lifecycle("show", "nothing")[0] == StoreError.exit_code


def test_collecting_an_empty_store_frees_nothing(lifecycle):
    code, output, _ = lifecycle("gc", "--dry-run", "--json")
    assert (code, json.loads(output)) == (0, {"dry_run": True, "garbage": [], "failures": []})


def test_schema_knows_every_kind(lifecycle):
    code, output, _ = lifecycle("schema")
    assert code == 0
    assert {"download", "train", "quantize", "serve", "evaluate"} <= set(output.replace('"', " ").split())


def test_status_and_down_without_servers(lifecycle):
    code, output, _ = lifecycle("status", "--json")
    assert code != 0
    assert {name: server["healthy"] for name, server in json.loads(output).items()} == {
        "prefect": False,
        "mlflow": False,
        "worker": False,
    }
    assert lifecycle("down")[0] == 0


def test_doctor_names_a_vllm_that_is_missing_and_what_to_do(lifecycle, monkeypatch):
    monkeypatch.setenv("LIFECYCLE_VLLM", "/nowhere/vllm")
    code, output, _ = lifecycle("doctor", "--json")
    findings = {finding["subject"]: finding for finding in json.loads(output)["findings"]}
    assert code != 0
    assert findings["vllm"]["state"] == "missing"
    assert "make environments" in findings["vllm"]["remedy"]
    assert findings["pipeline"]["state"] == "ok"


@pytest.mark.parametrize(("visible", "state"), [("99", "missing"), ("", "warning")])
def test_doctor_compares_the_gpus_of_the_driver_with_those_of_torch(tmp_path, monkeypatch, visible, state):
    (tmp_path / "0000:01:00.0").mkdir()
    (tmp_path / "0000:01:00.0" / "information").write_text("Model: \t\t NVIDIA H100 80GB HBM3\n")
    monkeypatch.setattr(machine, "GPUS", tmp_path)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    (finding,) = doctor._gpus()
    assert finding.state == state
    assert ("NVIDIA GPUs, but torch" if visible else "H100 80GB HBM3; torch sees 0") in finding.found
    assert "CUDA_VISIBLE_DEVICES" in finding.remedy


@pytest.mark.parametrize("shell", ["bash", "zsh"])
def test_a_shell_completes_commands_and_options(shell):
    asked = {"COMP_WORDS": "lifecycle rep", "COMP_CWORD": "1", "_LIFECYCLE_COMPLETE": f"{shell}_complete"}
    done = subprocess.run([LIFECYCLE], env={**os.environ, **asked}, capture_output=True, text=True)
    assert "report" in done.stdout.replace(",", "\n").split("\n")
    asked |= {"COMP_WORDS": "lifecycle report --comp", "COMP_CWORD": "2"}
    done = subprocess.run([LIFECYCLE], env={**os.environ, **asked}, capture_output=True, text=True)
    assert "--compare" in done.stdout.replace(",", "\n").split("\n")


def test_what_a_terminal_would_obey_is_written_out(lifecycle, recipe):
    code, _, errors = lifecycle("show", "\x1b[2Jname\u202e\x07")
    assert code == StoreError.exit_code
    assert r"name\u202e\x07" in errors and not {"\x1b", "\x07", "\u202e"} & set(errors)


def test_a_layout_of_any_length_is_refused_in_a_few_words(lifecycle, tmp_path):
    recipe = Path("configs/quickstart.yaml").absolute()
    code, _, errors = lifecycle("compare", recipe, "--stage", "sft", "--layouts", "x" * 5000)
    assert code == RecipeError.exit_code and len(errors) < 1000, errors
    (tmp_path / "bytes").write_bytes(b"\xff\xfe fsdp")
    code, _, errors = lifecycle("compare", recipe, "--stage", "sft", "--layouts", tmp_path / "bytes")
    assert code == RecipeError.exit_code and "cannot read the layouts" in errors


def test_a_link_to_itself_is_not_adopted(lifecycle, tmp_path):
    loop = tmp_path / "loop"
    loop.symlink_to(loop)
    code, _, errors = lifecycle("adopt", loop, "--kind", "model", "--name", "mine")
    assert code not in (0, 70) and str(loop) in errors
