"""Our code loads no pickles, runs no shell, and parses outside data safely, as a scan of its syntax shows."""

import ast
import gc
import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCES = sorted(path for folder in ("flows", "stages") for path in (ROOT / folder).rglob("*.py"))
PICKLES = {"pickle", "cPickle", "dill", "cloudpickle", "joblib", "shelve", "marshal"}
LOADERS = re.compile(r"Auto(Config|Model\w*|Tokenizer|Processor|\w+Processor)")
SHELLS = {"os.system", "os.popen", "subprocess.getoutput", "subprocess.getstatusoutput"}


@cache
def calls(tree):
    """Return the dotted name and the syntax node of every function call in a syntax tree."""
    return [(ast.unparse(node.func), node) for node in ast.walk(tree) if isinstance(node, ast.Call)]


def option(node, name):
    return next((keyword.value for keyword in node.keywords if keyword.arg == name), None)


def is_true(value):
    return isinstance(value, ast.Constant) and value.value is True


@pytest.fixture(scope="module")
def trees():
    assert len(SOURCES) > 100
    gc.disable()  # which would look through a million nodes again and again
    try:
        return {path.relative_to(ROOT).as_posix(): ast.parse(path.read_text()) for path in SOURCES}
    finally:
        gc.freeze()
        gc.enable()


def test_no_module_that_unpickles_is_imported(trees):
    imported = {
        (file, name.split(".")[0])
        for file, tree in trees.items()
        for node in ast.walk(tree)
        if isinstance(node, ast.Import | ast.ImportFrom)
        for name in ([alias.name for alias in node.names] if isinstance(node, ast.Import) else [node.module or ""])
    }
    assert {(file, name) for file, name in imported if name in PICKLES} == {
        ("stages/models/stored_tensors.py", "pickle")
    }
    used = {name for name, _ in calls(trees["stages/models/stored_tensors.py"]) if name.startswith("pickle.")}
    assert used == {"pickle.UnpicklingError"}, "the index of a checkpoint is read by a restricted unpickler alone"


def test_torch_load_is_called_for_tensors_alone_and_numpy_without_pickles(trees):
    for file, tree in trees.items():
        for name, node in calls(tree):
            if name.endswith("torch.load"):
                assert is_true(option(node, "weights_only")), f"{file}:{node.lineno}"
            if name in ("np.load", "numpy.load"):
                assert not is_true(option(node, "allow_pickle")), f"{file}:{node.lineno}"


def test_model_folders_are_opened_by_one_module(trees):
    """Only one module decides which files of a model folder are read, and which of its code runs."""
    named = {
        (file, name)
        for file, tree in trees.items()
        for node in ast.walk(tree)
        for name in (getattr(node, field, None) for field in ("id", "attr", "name", "value"))
        if isinstance(name, str) and LOADERS.fullmatch(name)
    }
    assert {file for file, _ in named} == {"stages/models/loading.py"}


def test_the_config_of_a_model_is_read_by_one_module(trees):
    """Only `ModelFacts` reads a model's `config.json`, once; all other code asks it for facts."""
    readers = set()
    for file, tree in trees.items():
        imported = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
        names = {alias.name for node in imported if node.module == "stages.models.facts" for alias in node.names}
        is_facts = file == "stages/models/facts.py"
        spellings = ["'config.json'", *(["CONFIG_FILE"] if is_facts or "CONFIG_FILE" in names else [])]
        for name, node in calls(tree):
            if name in ("json.loads", "json.load", "read_json_object") and any(
                spelling in ast.unparse(node) for spelling in spellings
            ):
                readers.add(file)
    assert readers == {"stages/models/facts.py"}


def test_yaml_is_loaded_by_safe_loaders_only(trees):
    loaders = {
        f"{file}: {ast.unparse(node.args[1] if len(node.args) > 1 else option(node, 'Loader'))}"
        for file, tree in trees.items()
        for name, node in calls(tree)
        if name in ("yaml.load", "yaml.load_all")
    }
    assert loaders == {"flows/recipe/text.py: RecipeLoader", "stages/harnesses/lm_eval/task_files.py: _Loader"}
    assert not [file for file, tree in trees.items() for name, _ in calls(tree) if name.startswith("yaml.unsafe")]


def test_no_shell_is_started_and_nothing_is_evaluated_but_by_the_confined_process_of_the_code_reward(trees):
    for file, tree in trees.items():
        for name, node in calls(tree):
            is_confined = (file, name) == ("stages/rewards/code_program.py", "exec")
            assert is_confined or name not in {*SHELLS, "eval", "exec"}, f"{file}:{node.lineno}"
            assert not is_true(option(node, "shell")), f"{file}:{node.lineno}"


def test_remote_code_is_trusted_only_where_the_recipe_says_so(trees):
    for file, tree in trees.items():
        for _, node in calls(tree):
            assert not is_true(option(node, "trust_remote_code")), f"{file}:{node.lineno}"
