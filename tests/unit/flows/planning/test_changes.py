"""A plan lists changed input files with the number of changed rows, and code of models or users that would run."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pyarrow.parquet
import pytest

from flows.cli.main import main
from flows.planning.changes import CONTENTS, content_changes, contents_of, keep_contents, kept_contents, with_changes
from flows.planning.outside import resolve_outside
from flows.planning.plan import plan
from flows.store.content import hash_path

CONFIGS = Path(__file__).parents[4] / "configs"


@pytest.fixture
def lifecycle(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("LIFECYCLE_HOME", str(tmp_path / "home"))

    def run(*arguments):
        with pytest.raises(SystemExit) as ended:
            main([str(argument) for argument in arguments])
        output = capsys.readouterr()
        return ended.value.code, output.out + output.err

    return run


def write_rows(file, number, word="Hello"):
    row = {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": word}]}
    file.write_text((json.dumps(row) + "\n") * number)


@pytest.fixture
def rows(tmp_path, lifecycle):
    """Provide a dataset folder taken into the store by `lifecycle adopt`, and a recipe that uses the folder."""
    folder = tmp_path / "rows"
    folder.mkdir()
    write_rows(folder / "train.jsonl", 300)
    write_rows(folder / "validation.jsonl", 20)
    (folder / "prices.csv").write_text("a,b\n1,2\n3,4\n")
    assert lifecycle("adopt", folder, "--kind", "dataset", "--name", "mine")[0] == 0
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("stages:\n  mine: {kind: download, dataset: file://rows}\n")
    return folder


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (lambda rows: write_rows(rows / "train.jsonl", 350), "train.jsonl 300 → 350 rows"),
        (lambda rows: write_rows(rows / "train.jsonl", 300, "Other"), "train.jsonl other rows, 300 rows"),
        (lambda rows: write_rows(rows / "more.jsonl", 7), "more.jsonl is new (7 rows)"),
        (lambda rows: (rows / "validation.jsonl").unlink(), "validation.jsonl is gone"),
        (lambda rows: (rows / "prices.csv").write_text("a,b\n1,2\n"), "prices.csv 2 → 1 rows"),
    ],
)
def test_files_that_changed_are_named_instead_of_two_hashes(lifecycle, rows, change, expected):
    change(rows)
    code, said = lifecycle("plan", rows.parent / "recipe.yaml")
    assert code == 0
    assert f": files of file://{rows}: {expected}\n" in said
    assert "content of revision" not in said


def test_a_source_elsewhere_is_named_with_its_path(lifecycle, rows, recipe, make_plan, build, store, tmp_path):
    """A plan names a dataset's old and new source after a change between a local folder and a hub, either way."""
    other = rows.parent / "recipe.yaml"
    other.write_text("stages:\n  mine: {kind: download, dataset: builtin/addition}\n")
    assert f"dataset file://{rows} → builtin/addition" in lifecycle("plan", other)[1]
    build(make_plan(recipe()))
    planned = make_plan(recipe(problems={"dataset": f"file://{rows}"}))
    reasons = with_changes(planned, store.index(), tmp_path / "kept").stages["problems"].reason
    assert f"dataset builtin/addition → file://{rows}" in reasons


def test_of_many_files_the_first_are_named(lifecycle, rows):
    for number in range(9):
        write_rows(rows / f"more-{number}.jsonl", 1)
    assert "more-4.jsonl is new (1 rows), and 4 more files" in lifecycle("plan", rows.parent / "recipe.yaml")[1]


def test_where_it_came_from_is_shown_with_its_path(lifecycle, rows):
    _, said = lifecycle("show", "mine")
    assert f"dataset: file://{rows}\n" in said


def test_code_from_outside_is_shown(lifecycle, tmp_path):
    shutil.copytree(CONFIGS / "tasks", tmp_path / "tasks")
    (tmp_path / "tasks" / "own.yaml").write_text("include: addition.yaml\ntask: own\ndoc_to_text: !function own.ask\n")
    (tmp_path / "tasks" / "own.py").write_text("def ask(row):\n    return row['question']\n")
    stages = {
        "base": {"kind": "download", "model": "builtin/qwen3-1m", "trust_remote_code": True},
        "served": {"kind": "serve", "model": "base", "serving": {"trust_remote_code": True}},
        "scores": {"kind": "evaluate", "model": "served", "tasks": ["own"], "task_folder": "tasks"},
    }
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(json.dumps({"stages": stages}))
    assert "trust_task_code" in lifecycle("plan", recipe)[1]
    code, said = lifecycle("plan", recipe, "--set", "stages.scores.trust_task_code=true")
    assert code == 0
    assert "base runs code from outside: trust_remote_code: Python files that come with the model" in said
    assert "served runs code from outside: serving.trust_remote_code: Python files" in said
    assert "scores runs code from outside: " in said and "own.ask" in said
    _, said = lifecycle("plan", recipe, "--set", "stages.scores.trust_task_code=true", "--json")
    assert [bool(stage["custom_code"]) for stage in json.loads(said)["stages"]] == [True, True, True]


def test_a_task_beside_the_recipe_is_pointed_at(lifecycle, tmp_path):
    (tmp_path / "tasks").mkdir()
    (tmp_path / "tasks" / "subtraction.yaml").write_text("task: subtraction\n")
    stages = {
        "base": {"kind": "download", "model": "builtin/qwen3-1m"},
        "scores": {"kind": "evaluate", "model": "base", "tasks": ["subtraction"]},
    }
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(json.dumps({"stages": stages}))
    _, said = lifecycle("plan", recipe)
    assert f"stages.scores: the task subtraction is in {tmp_path}/tasks/subtraction.yaml" in said
    assert "write `task_folder: tasks`" in said and "did you mean" not in said


def test_a_task_that_is_found_and_a_recipe_of_its_name_are_not_pointed_at(lifecycle, tmp_path):
    shutil.copytree(CONFIGS / "tasks", tmp_path / "tasks")
    stages = {
        "base": {"kind": "download", "model": "builtin/qwen3-1m"},
        "scores": {"kind": "evaluate", "model": "base", "tasks": ["addition", "other"], "task_folder": "tasks"},
    }
    for name in ("addition", "other"):  # neither is a task
        (tmp_path / f"{name}.yaml").write_text(json.dumps({"stages": stages}))
    _, said = lifecycle("plan", tmp_path / "other.yaml")
    assert f"stages.scores: neither {tmp_path}/tasks nor lm-eval has a task 'other'" in said


TEMPLATE = "{% for message in messages %}\n{{ message.content }}\n{% endfor %}\n"


@pytest.fixture
def tasks(tmp_path: Path) -> Path:
    folder = tmp_path / "tasks"
    folder.mkdir()
    (folder / "sums.yaml").write_text("task: sums\nnum_fewshot: 0\nlimit: 5\n")
    (folder / "sums.jsonl").write_text('{"question": 1}\n' * 500)
    return folder


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            lambda folder: (folder / "sums.yaml").write_text("task: sums\nnum_fewshot: 3\nlimit: 5\n"),
            "sums.yaml line 2: 'num_fewshot: 0' → 'num_fewshot: 3'",
        ),
        (
            lambda folder: (folder / "sums.yaml").write_text("task: sums\nlimit: 5\n"),
            "sums.yaml line 2: 'num_fewshot: 0' is gone",
        ),
        (
            lambda folder: (folder / "sums.yaml").write_text("task: sums\nnum_fewshot: 0\nlimit: 5\na: 1\nb: 2\n"),
            "sums.yaml line 4: 'a: 1' is new, and 1 more lines",
        ),
        (
            lambda folder: (folder / "sums.yaml").write_text("task: sums\r\nnum_fewshot: 0\r\nlimit: 5\r\n"),
            "sums.yaml 35 bytes → 38 bytes",
        ),
        (lambda folder: (folder / "sums.yaml").write_text("a: 1\n" * 900), "sums.yaml 35 → 4,500 bytes"),
        (lambda folder: (folder / "sums.yaml").write_bytes(b"\xff" * 35), "sums.yaml other bytes, 35 bytes"),
        (lambda folder: (folder / "sums.jsonl").write_text('{"question": 1}\n' * 499), "sums.jsonl 500 → 499 rows"),
        (lambda folder: (folder / "more.py").write_text("x"), "more.py is new (1 bytes)"),
        (lambda folder: (folder / "sums.jsonl").unlink(), "sums.jsonl is gone"),
        (lambda folder: None, ""),
    ],
)
def test_each_file_that_changed_is_named_with_its_first_line(tasks: Path, change: Callable, words: str) -> None:
    before = contents_of(tasks)
    change(tasks)
    assert ", ".join(content_changes(before, contents_of(tasks))) == words.replace(" bytes → ", " → ")


def test_what_was_kept_comes_back_and_what_is_damaged_is_as_if_it_were_not(tasks: Path, tmp_path: Path) -> None:
    kept, digest = tmp_path / "kept", hash_path(tasks)
    assert kept_contents(kept, digest) is None
    keep_contents(kept, digest, tasks)
    assert kept_contents(kept, digest) == contents_of(tasks)
    (kept / f"{digest}.json").write_text("{")
    assert kept_contents(kept, digest) is None


def test_a_long_file_is_not_kept_line_by_line(tasks: Path) -> None:
    (tasks / "sums.yaml").write_text("x" * 100_000)
    assert "x" * 100 not in CONTENTS.dump_json(contents_of(tasks)).decode()


@pytest.mark.parametrize(
    ("name", "content", "amount"),
    [
        ("a.csv", b'question,answer\n"two\nlines","""a"", b"\n\n1,2\n', "2 rows"),
        ("a.csv", b"", "0 rows"),
        ("a.csv", b"long\n" + b"x" * 200_000, "1 rows"),
        ("a.jsonl", b"{}\n\n{}", "2 rows"),
        ("a.parquet", None, "3 rows"),
        ("a.parquet", b"PAR1 no more", "12 bytes"),
    ],
)
def test_rows_are_counted_and_not_lines(tmp_path: Path, name: str, content: bytes | None, amount: str) -> None:
    file = tmp_path / name
    if content is None:
        pyarrow.parquet.write_table(pyarrow.table({"text": ["a\nb", "c", "d"]}), file)
    else:
        file.write_bytes(content)
    assert contents_of(tmp_path)[name].amount == amount


def test_a_plan_names_the_line_instead_of_two_hashes(recipe, store, build, tmp_path: Path, tasks: Path) -> None:
    template = tmp_path / "own.jinja"
    template.write_text(TEMPLATE)
    data = {"dataset": "problems", "chat_template": str(template)}

    def planned():
        small = recipe(sft={"data": data})
        made = plan(small, resolve_outside(small), store.index())
        return with_changes(made, store.index(), tmp_path / "kept")

    build(planned())
    assert planned().stages["sft"].action == "cached"
    template.write_text(TEMPLATE.replace("content }}", "content | trim }}"))
    reason = planned().stages["sft"].reason
    assert reason.startswith("differs from version ")
    assert reason.endswith(
        ": data.chat_template: own.jinja line 2: '{{ message.content }}' → '{{ message.content | trim }}'"
    )


def test_what_nobody_kept_is_told_by_its_hash(recipe, store, build, tmp_path: Path) -> None:
    template = tmp_path / "own.jinja"
    template.write_text(TEMPLATE)
    small = recipe(sft={"data": {"dataset": "problems", "chat_template": str(template)}})
    build(plan(small, resolve_outside(small), store.index()))
    template.write_text("other")
    made = with_changes(plan(small, resolve_outside(small), store.index()), store.index(), tmp_path / "kept")
    assert "content of data.chat_template" in made.stages["sft"].reason


KEYS = ("hf_" + "a1B2" * 8, "8f3e2a" * 6, "correct-horse", "opensesame7", "Zm9vYmFy" * 5 + "9==")
TASK_WITH_KEYS = """task: sums
api_key: correct-horse
headers: {"X-Auth": 8f3e2a8f3e2a8f3e2a8f3e2a8f3e2a8f3e2a, "secret": "opensesame7"}
password: >
  opensesame7

  opensesame7
url: https://me:opensesame7@host/
note: hf_a1B2a1B2a1B2a1B2a1B2a1B2a1B2a1B2 Zm9vYmFyZm9vYmFyZm9vYmFyZm9vYmFyZm9vYmFy9==
num_fewshot: 0
"""


@pytest.mark.parametrize("name", ["reward.py", "task.yaml", "template.jinja", "schema.json", "run.sh", "key"])
def test_no_key_is_copied(tmp_path: Path, name: str) -> None:
    file, kept = tmp_path / name, tmp_path / "kept"
    file.write_text(TASK_WITH_KEYS)
    keep_contents(kept, "0" * 64, file)
    noted = (kept / f"{'0' * 64}.json").read_text()
    assert [key for key in KEYS if key in noted] == []
    assert "8f3e2a" not in noted
    assert ("num_fewshot" in noted) == name.endswith((".yaml", ".jinja", ".json"))


def test_a_line_beside_a_key_is_still_told(tmp_path: Path) -> None:
    file = tmp_path / "task.yaml"
    file.write_text(TASK_WITH_KEYS)
    before = contents_of(file)
    file.write_text(TASK_WITH_KEYS.replace("num_fewshot: 0", "num_fewshot: 3"))
    assert list(content_changes(before, contents_of(file))) == [
        "task.yaml line 10: 'num_fewshot: 0' → 'num_fewshot: 3'"
    ]
    file.write_text(TASK_WITH_KEYS.replace("correct-horse", "wrong-horse"))
    (change,) = content_changes(before, contents_of(file))
    assert change == f"task.yaml {len(TASK_WITH_KEYS)} → {len(TASK_WITH_KEYS) - 2} bytes"


def test_keys_that_an_earlier_version_kept_are_removed(tmp_path: Path) -> None:
    old = {
        "reward.py": {"sha256": "0" * 64, "amount": "9 bytes", "text": "KEY = 'correct-horse'"},
        "task.yaml": {"sha256": "0" * 64, "amount": "9 bytes", "text": TASK_WITH_KEYS},
    }
    note = tmp_path / "digest.json"
    note.write_bytes(CONTENTS.dump_json(CONTENTS.validate_python(old)))
    keep_contents(tmp_path, "digest", tmp_path)
    assert [key for key in KEYS if key in note.read_text()] == []
    assert "num_fewshot: 0" in note.read_text()
