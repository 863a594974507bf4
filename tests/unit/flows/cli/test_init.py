"""`lifecycle init`: rows of one's own become a recipe that can be planned, and a task that training never sees."""

import json
import re

import pytest

from flows.cli.main import main
from flows.recipe.recipe import load_recipe
from stages.core.errors import DataError, RecipeError
from stages.data.files import read_rows
from stages.data.portion import portions


def chat(question, answer):
    return {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]}


SHORT = [chat(f"What is {n} + 1?", str(n + 1)) for n in range(400)]
LONG = [chat(f"Tell me of {n}.", f"{n} is a number of many uses, and there is much to say of it.") for n in range(400)]
YES, NO = ([{"role": "assistant", "content": answer}] for answer in ("yes", "no"))
PAIRS = [{"prompt": f"Is {2 * n} even?", "chosen": YES, "rejected": NO} for n in range(400)]
LABELLED = [
    {"prompt": [{"role": "user", "content": f"Is {n} even?"}], "completion": YES, "label": n % 2 == 0}
    for n in range(400)
]
TEXTS = [{"text": f"Number {n}."} for n in range(400)]


@pytest.fixture
def lifecycle(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("LIFECYCLE_HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)

    def run(*arguments):
        with pytest.raises(SystemExit) as ended:
            main([str(argument) for argument in arguments])
        output = capsys.readouterr()
        return ended.value.code, output.out + output.err

    return run


def init(lifecycle, tmp_path, rows, *options, name="My rows.v2.jsonl"):
    (tmp_path / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
    return lifecycle("init", "--data", name, "--model", "builtin/qwen3-1m", *options)


@pytest.mark.parametrize(
    ("rows", "method", "has_task"),
    [(SHORT, "sft", True), (LONG, "sft", True), (PAIRS, "dpo", True), (LABELLED, "kto", True), (TEXTS, "sft", False)],
)
def test_what_is_written_can_be_planned(lifecycle, tmp_path, rows, method, has_task):
    code, said = init(lifecycle, tmp_path, rows)
    assert code == 0, said
    assert "400 rows" in said and "wrote my-rows.yaml" in said
    code, said = lifecycle("plan", "my-rows.yaml")
    assert code == 0, said
    recipe = load_recipe(tmp_path / "my-rows.yaml")
    assert recipe.stages[method].kind == "train"
    assert (tmp_path / "tasks" / "my-rows.yaml").exists() == has_task == ("promote" in recipe.stages)


def test_every_command_that_the_recipe_names_answers(lifecycle, tmp_path):
    init(lifecycle, tmp_path, SHORT)
    commands = re.findall(r"`lifecycle ([^`]+)`", (tmp_path / "my-rows.yaml").read_text())
    assert len(commands) == 2
    for command in commands:
        code, said = lifecycle(*command.split())
        assert code == 0, said


def test_the_task_asks_what_training_holds_out_and_nothing_else(lifecycle, tmp_path):
    init(lifecycle, tmp_path, SHORT)
    questions = [json.loads(line) for line in (tmp_path / "tasks" / "my-rows.jsonl").read_text().splitlines()]
    data = load_recipe(tmp_path / "my-rows.yaml").stages["sft"].data
    training, held_out = (
        {json.dumps(row.content) for row in portion.select(read_rows(tmp_path, [tmp_path / "My rows.v2.jsonl"]))}
        for portion in portions(data)
    )
    asked = {json.dumps(chat(one["question"], one["answer"])) for one in questions}
    assert asked == held_out and not asked & training


@pytest.mark.parametrize(("rows", "output_type"), [(SHORT, "generate_until"), (LONG, "loglikelihood")])
def test_lm_eval_loads_the_task(lifecycle, tmp_path, monkeypatch, rows, output_type):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    from lm_eval.tasks import TaskManager

    init(lifecycle, tmp_path, rows)
    monkeypatch.chdir(tmp_path / "tasks")
    loaded = TaskManager(include_path=str(tmp_path / "tasks"), include_defaults=False).load(["my-rows"])
    (task,) = loaded["tasks"].values()
    assert output_type == task.OUTPUT_TYPE
    document = next(iter(task.test_docs()))
    assert chat(task.doc_to_text(document), task.doc_to_target(document)) in rows


@pytest.mark.parametrize(
    ("model", "rate"),
    [
        ("hf://Qwen/Qwen3-0.6B", 5e-5),
        ("hf://meta-llama/Llama-3.1-8B", 1e-5),
        ("hf://a/unnamed", 1e-5),
        ("hf://a/tiny-30M", 5e-5),
        ("builtin/qwen3-1m", 3e-3),
    ],
)
def test_the_learning_rate_follows_the_size_in_the_models_name(lifecycle, tmp_path, model, rate):
    init(lifecycle, tmp_path, SHORT, "--model", model)
    assert load_recipe(tmp_path / "my-rows.yaml").stages["sft"].learning_rate == rate


@pytest.mark.parametrize(("num_rows", "answer", "length"), [(400, "5", 128), (400, "5 " * 400, 512), (9000, "5", 512)])
def test_few_rows_are_packed_into_short_ones_so_that_there_are_steps_to_learn_in(
    lifecycle, tmp_path, num_rows, answer, length
):
    init(lifecycle, tmp_path, [chat(f"What is {number}?", answer) for number in range(num_rows)])
    assert load_recipe(tmp_path / "my-rows.yaml").stages["sft"].data.sequence_length == length


def test_bad_rows_are_counted_and_the_first_is_named(lifecycle, tmp_path):
    code, said = init(lifecycle, tmp_path, [SHORT[0], {"messages": []}, {"messages": 5}, *SHORT[1:]])
    assert code == 0
    assert "2 bad rows" in said and "My rows.v2.jsonl:2: " in said


def test_what_is_there_is_not_written_over(lifecycle, tmp_path):
    init(lifecycle, tmp_path, SHORT)
    code, said = init(lifecycle, tmp_path, LONG)
    assert code == RecipeError.exit_code and "exists already" in said
    assert init(lifecycle, tmp_path, LONG, "--folder", "other")[0] == 0


@pytest.mark.parametrize("rows", [[], [{"messages": 5}], [[1]], [{"a": 1}]])
def test_what_holds_no_rows_is_refused(lifecycle, tmp_path, rows):
    code, said = init(lifecycle, tmp_path, rows)
    assert code == DataError.exit_code and "Traceback" not in said
    assert lifecycle("init", "--data", "none.jsonl")[0] == DataError.exit_code
