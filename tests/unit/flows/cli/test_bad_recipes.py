"""`lifecycle plan` refuses all kinds of invalid recipes quickly, with a sentence instead of a traceback."""

import json
import os
import random
import shutil
import signal
import time
from pathlib import Path

import pytest
import yaml

from flows.cli.main import main
from flows.recipe.recipe import json_schema
from stages.core.errors import RecipeError, error_classes

CONFIGS = Path(__file__).parents[4] / "configs"
LONGEST_S = 2
SENTENCES = {error.exit_code for error in error_classes().values()} - {70}
TREE = yaml.safe_load((CONFIGS / "quickstart.yaml").read_text())
BASE = "name: small\nstages:\n  base: {kind: download, model: builtin/qwen3-1m}\n"
LONG = "x" * 500_000


@pytest.fixture
def plan(tmp_path, monkeypatch, capsys):
    """Provide a function that runs `lifecycle plan` on a recipe, and returns exit code, output and CPU seconds."""
    monkeypatch.setenv("LIFECYCLE_HOME", str(tmp_path / "home"))
    for folder in ("tasks", "templates"):
        shutil.copytree(CONFIGS / folder, tmp_path / folder)

    def hang(number, frame):
        raise AssertionError("still not done")

    def run(recipe, *overrides):
        path = recipe if isinstance(recipe, Path) else tmp_path / "recipe.yaml"
        if path is not recipe:
            path.write_text(recipe)
        before = signal.signal(signal.SIGALRM, hang)
        signal.alarm(300)  # by the clock: a busy machine takes its time
        began_s = time.process_time()
        try:
            with pytest.raises(SystemExit) as ended:
                main(["plan", str(path), *(part for override in overrides for part in ("--set", override))])
        finally:
            seconds = time.process_time() - began_s
            signal.alarm(0)
            signal.signal(signal.SIGALRM, before)
        output = capsys.readouterr()
        return ended.value.code, output.out + output.err, seconds

    return run


def chain(length):
    stages = [f"  s{number}: {{kind: quantize, model: s{number - 1}}}" for number in range(1, length)]
    return "\n".join(["name: small", "stages:", "  s0: {kind: download, model: builtin/qwen3-1m}", *stages])


def merge_bomb():
    levels = [f"m{n}: &m{n} {{k{n}: 1, <<: [{', '.join([f'*m{n - 1}'] * 10)}]}}" for n in range(1, 12)]
    return "\n".join(["m0: &m0 {a: 1}", *levels, BASE])


BAD = {
    "nested lists": BASE + "more: " + "[" * 100_000,
    "nested mappings": BASE + "more: " + "{a: " * 100_000,
    "nested blocks": BASE + "more: " + "- " * 100_000,
    "closed nested lists": BASE + "more: " + "[" * 400 + "]" * 400,
    "merge bomb": merge_bomb(),
    "alias in itself": BASE + "more: &a {b: *a}",
    "chain of stages": chain(1200),
    "wide promotion": BASE + f"  end: {{kind: promote, name: a, model: base, evaluations: [{'nope,' * 90_000}]}}",
    "many stages": "stages:\n" + "".join(f"  s{n}: {{kind: promote}}\n" for n in range(20_000)),
    "many unknown fields": BASE + "  two: {kind: train, " + ", ".join(f"field{n}: 1" for n in range(40_000)) + "}",
    "many unknown top-level fields": BASE + "".join(f"field{n}: 1\n" for n in range(40_000)),
    "many bad values": BASE + f"  two: {{kind: download, model: builtin/qwen3-1m, files: [{'1,' * 90_000}]}}",
    "long reference": BASE + f"  two: {{kind: quantize, model: {LONG}}}",
    "long kind": BASE + f"  two: {{kind: {LONG}, model: base}}",
    "long source": BASE + f"  two: {{kind: download, model: {LONG}}}",
    "long file source": BASE + f"  two: {{kind: download, model: 'file://{LONG}'}}",
    "long repository": BASE + f"  two: {{kind: download, model: 'hf://{LONG}'}}",
    "long path": BASE + f"  two: {{kind: evaluate, model: base, tasks: [addition], task_folder: {LONG}}}",
    "long task": BASE + f"  two: {{kind: evaluate, model: base, tasks: [{LONG}], task_folder: tasks}}",
    "task is a path": BASE + "  two: {kind: evaluate, model: base, tasks: [/proc]}",
    "task is a pattern": BASE + "  two: {kind: evaluate, model: base, tasks: ['[*', '**/..']}",
    "long unknown task": BASE + f"  two: {{kind: evaluate, model: base, tasks: [{LONG}]}}",
    "long key": BASE + f"  ? {LONG}\n  : {{kind: quantize, model: base}}",
    "long literal": BASE + f"  two: {{kind: quantize, model: base, method: {LONG}}}",
    "long field": BASE + f"  two:\n    kind: quantize\n    ? {LONG}\n    : 1",
    "task folder is the whole machine": BASE
    + "  two: {kind: evaluate, model: base, tasks: [addition], task_folder: /}",
    "task folder is a device": BASE + "  two: {kind: evaluate, model: base, tasks: [addition], task_folder: /dev/zero}",
    "source is the whole machine": BASE + "  two: {kind: download, model: 'file:///'}",
    "source is a device": BASE + "  two: {kind: download, model: 'file:///dev/zero'}",
    "unknown user": BASE + "  two: {kind: evaluate, model: base, tasks: [a], task_folder: ~nobody-at-all/tasks}",
    "NUL in a path": BASE + '  two: {kind: evaluate, model: base, tasks: [a], task_folder: "a\\0b"}',
    "NUL in a source": BASE + '  two: {kind: download, model: "file:///a\\0b"}',
    "number of 5,000 digits": BASE + f"  two: {{kind: download, model: {'9' * 5000}}}",
    "number in base 60": BASE + f"more: 1{':59' * 100_000}.5",
    "number of many digits": BASE + "more: 1" + "_1" * 200_000,
    "list as a key": BASE + "more: {[a]: 1, [a]: 2}",
    "stages is null": "name: a\nstages:",
    "stage is null": BASE + "  two:",
    "two documents": BASE + "---\n" + BASE,
    "empty": "",
    "control character": BASE + "more: \x07",
}


@pytest.mark.parametrize("text", BAD.values(), ids=BAD)
def test_a_bad_recipe_is_refused_at_once_and_in_few_words(plan, text):
    code, said, seconds = plan(text)
    assert code in SENTENCES, said[:2000]
    assert "Traceback" not in said
    assert len(said) < 150_000
    assert seconds < LONGEST_S


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("task: sums\nmore: " + "[" * 50_000, "values lie more than 50 deep"),
        (merge_bomb().replace(BASE, "task: sums"), "its aliases (`*name`) stand for"),
        ("task: é".encode("latin1"), "is no readable YAML"),
        ("- sums", "holds a list; expected the mapping of an lm-eval task"),
    ],
    ids=["nested", "merge bomb", "not UTF-8", "list"],
)
def test_a_bad_task_file_is_refused_by_its_name(plan, tmp_path, content, words):
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "sums.yaml").write_bytes(content if isinstance(content, bytes) else content.encode())
    code, said, seconds = plan(BASE + "  two: {kind: evaluate, model: base, tasks: [sums], task_folder: own}")
    assert code in SENTENCES and "own/sums.yaml" in said and words in said, said[:2000]
    assert seconds < LONGEST_S


@pytest.mark.parametrize("path", ["/proc/self/environ", "/proc/kmsg", "/sys/kernel/notes"])
def test_what_the_kernel_makes_as_it_is_read_is_no_regular_file(plan, path):
    _, said, _ = plan(BASE + f"  two: {{kind: evaluate, model: base, tasks: [a], task_folder: {path}}}")
    assert "regular file" in said or "there is no file" in said


@pytest.mark.parametrize("value", ["null", "[]", "{}", "text", "[1]", "{a: 1}", "{a: {b: {c: 1}}}", "[" * 9000, "'"])
def test_stages_may_not_be_set_to_what_are_no_stages(plan, value):
    code, said, seconds = plan(BASE, f"stages={value}", "stages.base.model=builtin/qwen3-1m")
    assert code == RecipeError.exit_code
    assert "stages" in said and "internal error" not in said
    assert seconds < LONGEST_S


@pytest.mark.parametrize("path", [".".join("a" * 100_000), "stages." + LONG, "", "=", "stages..", LONG])
def test_a_bad_override_is_refused_in_few_words(plan, path):
    code, said, seconds = plan(BASE, f"{path}=1")
    assert code == RecipeError.exit_code
    assert len(said) < 2000
    assert seconds < LONGEST_S


@pytest.mark.parametrize("field", ["recipe", "chat_template", "task_folder", "file in task_folder", "model"])
@pytest.mark.parametrize("special", ["pipe", "device"])
def test_only_regular_files_are_read(plan, tmp_path, field, special):
    """A recipe that names a pipe or device as a file is refused, since reading that could block forever."""
    path = tmp_path / "special"
    if field == "file in task_folder":
        path.mkdir()
    target = path / "inner.yaml" if path.is_dir() else path
    if special == "pipe":
        os.mkfifo(target)
    else:
        target.symlink_to("/dev/zero")
    tree = json.loads(json.dumps(TREE))
    if field == "chat_template":
        tree["stages"]["sft"]["data"]["chat_template"] = str(path)
    elif field == "model":
        tree["stages"]["base"]["model"] = f"file://{path}"
    elif field != "recipe":
        tree["stages"]["evaluate-base"]["task_folder"] = str(path)
    code, said, _ = plan(path if field == "recipe" else json.dumps(tree))
    assert code in SENTENCES, said
    assert "regular file" in said
    assert field == "recipe" or field.rpartition(" ")[2] in said


@pytest.mark.parametrize(
    "override",
    [
        "stages.base.execution.environment.HF_TOKEN=s3cret-value",
        "stages.base.execution.environment={HF_TOKEN: s3cret-value}",
        "stages.base.execution.environment={HF_TOKEN: s3cret-value",
        "stages.base.execution={environment: {A: b, HF_TOKEN: s3cret-value}}",
        "stages.base={kind: download, model: builtin/qwen3-1m, execution: {environment: {DB_PASSWORD: s3cret-value}}}",
        "stages={base: {kind: download, execution: {environment: {DB_PASSWORD: s3cret-value}}}}",
        "stages.base.model=https://me:s3cret-value@hub.example/x",
        "stages.base.execution.environment.HF_ENDPOINT=https://me:s3cret-value@hub.example",
        "stages.base.files=[a, 'https://me:s3cret-value@hub.example']",
    ],
)
def test_a_secret_on_the_command_line_is_refused_however_it_is_given_and_not_repeated(plan, override):
    code, said, _ = plan(BASE, override)
    assert code == RecipeError.exit_code
    assert "command line can be seen by everyone" in said or "not valid YAML" in said
    assert "s3cret-value" not in said


@pytest.mark.parametrize("value", ['"\\ud800"', '"a\\udc00b"', '"\\ud83d\\ud83d"'])
def test_half_a_character_is_told_with_line_and_field(plan, value):
    text = BASE + f"  two:\n    kind: evaluate\n    model: {value}\n"
    _, said, _ = plan(text)
    assert "line 6: not valid YAML: half a character" in said and "(in stages.two.model)" in said
    _, said, _ = plan(json.dumps(yaml.safe_load(BASE))[:-1] + f', "name": {value}}}')
    assert "(in name)" in said
    _, said, _ = plan(BASE, f"stages.base.model={value}")
    assert "override `stages.base.model`" in said


def places(tree, path=()):
    """Yield the path (keys and indices) of every node of a nested dict or list, inner nodes included."""
    for key, value in tree.items() if isinstance(tree, dict) else enumerate(tree):
        yield (*path, key)
        if isinstance(value, dict | list):
            yield from places(value, (*path, key))


def mutated(rng, fields):
    """Return the quickstart recipe with one to three random errors: nodes replaced, removed or copied elsewhere."""
    tree = json.loads(json.dumps(TREE))
    for _ in range(rng.randint(1, 3)):
        *parents, last = rng.choice([*places(tree)])
        parent = tree
        for key in parents:
            parent = parent[key]
        match rng.randrange(4):
            case 0:
                del parent[last]
            case 1 if isinstance(parent, dict):
                parent[rng.choice(fields)] = parent[last]
            case _:
                parent[last] = rng.choice(VALUES)
    return tree


VALUES = [
    *(
        None,
        True,
        0,
        -1,
        1,
        3,
        10**30,
        2**63,
        1e-300,
        1e300,
        0.5,
        "",
        " ",
        "a",
        "sft",
        "base",
        "none",
        "auto",
        "é\u202e",
    ),
    *(
        [],
        {},
        [[]],
        {"a": 1},
        ["base"],
        [None],
        "file://",
        "file://nowhere",
        "hf://",
        "hf://a/b@",
        "~",
        "..",
        "*" * 3000,
    ),
    *("builtin/addition", "builtin/qwen3-1m", "tasks", "\0", "{{", "*a", 1.0, "1", "1e-4", {"kind": "train"}, [1, "a"]),
]


def test_hundreds_of_mutations_of_a_recipe_end_with_a_plan_or_a_sentence(plan, monkeypatch):
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setattr("stages.remote.http.FIRST_WAIT_S", 0.001)
    definitions = json_schema()["$defs"].values()
    fields = sorted({field for one in definitions for field in one.get("properties", ())})
    rng = random.Random(20261122)
    codes = []
    for number in range(400):
        tree = mutated(rng, fields)
        code, said, seconds = plan(json.dumps(tree))
        assert code == 0 or code in SENTENCES, f"mutation {number}: {said[:3000]}\n{json.dumps(tree)}"
        assert seconds < LONGEST_S, f"mutation {number}: {json.dumps(tree)}"
        codes.append(code)
    assert codes.count(0) > 15, "some mutations are as good as what was there"
