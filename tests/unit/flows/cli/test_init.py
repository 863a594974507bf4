"""`lifecycle init` turns a user's rows into a valid recipe, with an evaluation task that training never sees.

Rows of every format that the documentation of recipes lists are read by the train stage of the written recipe.
"""

import csv
import gzip
import json
import re

import pyarrow
import pyarrow.parquet
import pytest
import yaml

from flows.cli.main import main
from flows.planning.most_tokens import most_tokens
from flows.planning.survey import TEMPLATES
from flows.recipe.recipe import load_recipe
from stages.core.contract import StageInput
from stages.core.errors import DataError, ModelError, RecipeError
from stages.data.files import portions, read_rows
from stages.data.formats import FORMATS, RowReader
from stages.data.messages import PlainText
from stages.data.tokenizer import DocumentTokenizer
from stages.hubs.builtin.hub import BUILTINS
from stages.hubs.builtin.qwen3 import make_tokenizer
from stages.kinds.train.config import TrainConfig
from stages.kinds.train.look import look
from tests.hub_server import running_hub


def user(content):
    return {"role": "user", "content": content}


def assistant(content):
    return {"role": "assistant", "content": content}


def chat(question, answer):
    return {"messages": [user(question), assistant(answer)]}


def parts(message):
    content = [{"type": "text", "value": message["content"]}]
    return {**message, "content": content, "loss_weight": float(message["role"] == "assistant")}


def human(content):
    return {"from": "human", "value": content}


def gpt(content):
    return {"from": "gpt", "value": content}


SHORT = [chat(f"What is {n} + 1?", str(n + 1)) for n in range(400)]
LONG = [chat(f"Tell me of {n}.", f"{n} is a number of many uses, and there is much to say of it.") for n in range(400)]
YES, NO = ([assistant(answer)] for answer in ("yes", "no"))
PAIRS = [{"prompt": f"Is {2 * n} even?", "chosen": YES, "rejected": NO} for n in range(400)]
LABELLED = [{"prompt": [user(f"Is {n} even?")], "completion": YES, "label": n % 2 == 0} for n in range(400)]
TEXTS = [{"text": f"Number {n}."} for n in range(400)]
PROMPTS = [{"prompt": f"What is {n} + 1?", "answer": f"{n} + 1 is {n + 1}"} for n in range(400)]
Q, A, B, OK = "Is {} even?", "It is.", "It is not.", {"label": True}
ROWS = {
    "messages": {"messages": [user(Q), assistant(A)]},
    "sharegpt": {"conversations": [human(Q), gpt(A)], "system": "Be brief."},
    "prompt_completion": {"prompt": Q, "completion": A},
    "alpaca": {"instruction": Q, "input": "", "output": A},
    "query_response": {"query": Q, "response": A, "history": [["Hi", "Hello"]]},
    "human_assistant": {"conversation": [{"human": Q, "assistant": A}]},
    "text": {"text": Q},
    "sharegpt_preference": {"conversations": [human(Q)], "chosen": gpt(A), "rejected": gpt(B)},
    "messages_preference": {"messages": [user(Q)], "chosen": assistant(A), "rejected": assistant(B)},
    "alpaca_preference": {"instruction": Q, "input": "", "chosen": A, "rejected": B},
    "preference": {"prompt": Q, "chosen": [assistant(A)], "rejected": [assistant(B)]},
    "rejected_response": {"messages": [user(Q), assistant(A)], "rejected_response": B},
    "rejected_messages": {"messages": [user(Q), assistant(A)], "rejected_messages": [user(Q), assistant(B)]},
    "chosen_messages": {
        "chosen_messages": [parts(user(Q)), parts(assistant(A))],
        "rejected_messages": [parts(user(Q)), parts(assistant(B))],
    },
    "labelled": {"prompt": [user(Q)], "completion": [assistant(A)], **OK},
    "labelled_messages": {"messages": [user(Q), assistant(A)], **OK},
    "labelled_sharegpt": {"conversations": [human(Q), gpt(A)], **OK},
    "labelled_alpaca": {"instruction": Q, "output": A, **OK},
}
"""A sample row of each data format, with `{}` where each copy of the row gets its own number."""
METHODS = {"examples": "sft", "pairs": "dpo", "labelled": "kto"}


def numbered(row, count=40):
    """Return numbered copies of a sample row; if the row has a good/bad label, every second copy is bad."""
    rows = [json.loads(json.dumps(row).replace("{}", str(number))) for number in range(count)]
    return [{**one, "label": number % 2 == 0} if "label" in one else one for number, one in enumerate(rows)]


@pytest.fixture
def lifecycle(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("LIFECYCLE_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.chdir(tmp_path)

    def run(*arguments):
        with pytest.raises(SystemExit) as ended:
            main([str(argument) for argument in arguments])
        output = capsys.readouterr()
        return ended.value.code, output.out + output.err

    return run


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """Provide the folder of a model with config and tokenizer, but without weights."""
    folder = tmp_path_factory.mktemp("model") / "model"
    make_tokenizer().save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps(BUILTINS["qwen3-1m"].sizes))
    return folder


def init(lifecycle, tmp_path, rows, *options, name="My rows.v2.jsonl"):
    (tmp_path / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
    return lifecycle("init", "--data", name, "--model", "builtin/qwen3-1m", *options)


def read_by_training(tmp_path, recipe, stage, model):
    """Return what `lifecycle data` would show for a train stage of a recipe, computed in this process."""
    config = load_recipe(recipe).stages[stage]
    source = load_recipe(recipe).stages["rows"].source.name
    artifact = tmp_path / "artifact"
    artifact.mkdir()
    (artifact / "data").symlink_to(source, target_is_directory=True)
    if not (artifact / "data").is_dir():
        (artifact / "data").unlink()
        (artifact / "data").mkdir()
        (artifact / "data" / source.split("/")[-1]).symlink_to(source)
    stage_input = StageInput(
        name=stage,
        kind="train",
        version="",
        config=config.model_dump(mode="json", exclude={"execution"}),
        inputs={"rows": artifact, "base": model.parent},
        cache=tmp_path / "cache",
    )
    (tmp_path / "scratch").mkdir()
    return look(stage_input, 3, tmp_path / "scratch")


@pytest.mark.parametrize(
    ("rows", "method"),
    [(SHORT, "sft"), (LONG, "sft"), (PAIRS, "dpo"), (LABELLED, "kto"), (TEXTS, "sft"), (PROMPTS, "grpo")],
)
def test_what_is_written_can_be_planned(lifecycle, tmp_path, rows, method):
    code, said = init(lifecycle, tmp_path, rows)
    assert code == 0, said
    assert "400 rows" in said and "wrote my-rows.yaml" in said
    code, said = lifecycle("plan", "my-rows.yaml")
    assert code == 0, said
    recipe = load_recipe(tmp_path / "my-rows.yaml")
    assert recipe.stages[method].kind == "train"
    assert recipe.stages["promote"].evaluations == ("evaluate",)
    assert (tmp_path / "tasks" / "my-rows.yaml").exists()


@pytest.mark.parametrize("name", FORMATS)
def test_rows_of_every_format_are_read_at_once_by_the_stage_that_is_written(lifecycle, tmp_path, model, name):
    rows = numbered(ROWS[name])
    code, said = init(lifecycle, tmp_path, rows, "--model", model)
    assert code == 0, said
    assert f"40 rows in the format {name}" in said
    method = METHODS[FORMATS[name].rows]
    shown = read_by_training(tmp_path, tmp_path / "my-rows.yaml", method, model)
    training, held_out = shown.portions
    assert training.num_source_rows + held_out.num_source_rows == 40
    assert training.num_bad_rows == training.num_over_long == held_out.num_over_long == 0
    assert (tmp_path / "tasks" / "my-rows.jsonl").read_text()


def test_prompts_with_right_answers_are_sampled_for(lifecycle, tmp_path, model):
    code, said = init(lifecycle, tmp_path, PROMPTS, "--model", model)
    assert code == 0 and "400 rows of prompts with right answers" in said
    config = load_recipe(tmp_path / "my-rows.yaml").stages["grpo"]
    assert [reward.type for reward in config.grpo.rewards.values()] == ["number"]
    shown = read_by_training(tmp_path, tmp_path / "my-rows.yaml", "grpo", model)
    assert [len(row.documents) for row in shown.rows] == [2, 2, 2]
    assert json.loads((tmp_path / "tasks" / "my-rows.jsonl").read_text().splitlines()[7])["answer"] == "8"
    code, said = init(lifecycle, tmp_path, [{"prompt": "a"}] * 9, "--folder", "other")
    assert code == DataError.exit_code and "prompts without answers" in said


GSM = [{"question": f"What is {n} + 1?", "answer": f"It is {n + 1}."} for n in range(40)]


@pytest.mark.parametrize(
    ("rows", "options", "columns", "form"),
    [
        (GSM, [], {"question": "query", "answer": "response"}, "query_response"),
        (GSM, ["--columns", "question=prompt,answer=completion"], {"question": "prompt", "answer": "completion"}, None),
        (GSM, ["--columns", "question=instruction", "--columns", "answer=output"], None, "alpaca"),
        ([{"prompt": "a {}", "response": "b"}], [], {"prompt": "query"}, "query_response"),
        (
            [{"instruction": "a {}", "context": "", "response": "b"}],
            [],
            {"response": "output", "context": "input"},
            None,
        ),
        (
            [{"Q": "a {}", "up": "b", "down": "c"}],
            ["--columns", "Q=prompt,up=chosen,down=rejected"],
            None,
            "preference",
        ),
    ],
)
def test_columns_of_other_names_are_read_as_a_person_or_their_names_say(
    lifecycle, tmp_path, model, rows, options, columns, form
):
    rows = rows if len(rows) > 1 else numbered(rows[0])
    code, said = init(lifecycle, tmp_path, rows, "--model", model, *options)
    assert code == 0, said
    (method,) = {"sft", "dpo"} & load_recipe(tmp_path / "my-rows.yaml").stages.keys()
    data = load_recipe(tmp_path / "my-rows.yaml").stages[method].data
    assert columns is None or data.columns == columns
    assert form is None or data.format == form
    assert read_by_training(tmp_path, tmp_path / "my-rows.yaml", method, model).portions[0].num_bad_rows == 0


@pytest.mark.parametrize(
    ("columns", "problem"),
    [
        ("question", "expected THEIRS=OURS"),
        ("question=promt,answer=completion", "did you mean `prompt`"),
        ("question=prompt,answer=prompt", "names a column twice"),
        ("frage=prompt,answer=completion", "has no column `frage`; found `question`, `answer`"),
        ("question=text,answer=rejected", "which are both read as `text`"),
    ],
)
def test_columns_that_make_no_sense_are_refused(lifecycle, tmp_path, model, columns, problem):
    rows = [{**row, "text": "x"} for row in GSM] if "both" in problem else GSM
    code, said = init(lifecycle, tmp_path, rows, "--columns", columns, "--model", model)
    assert code in (RecipeError.exit_code, DataError.exit_code) and "Traceback" not in said
    assert problem in said
    assert not (tmp_path / "my-rows.yaml").exists()


def test_a_recipe_names_columns_that_formats_have_and_leaving_them_out_changes_no_version():
    base = {"kind": "train", "method": "sft", "model": "base", "global_batch_size": 1, "learning_rate": 1e-4}
    plain = TrainConfig.model_validate({**base, "data": {"dataset": "rows"}})
    assert "columns" not in json.dumps(plain.identity())
    named = TrainConfig.model_validate(
        {**base, "data": {"dataset": "rows", "columns": {"q": "query", "a": "response"}}}
    )
    assert named.identity() != plain.identity()
    for columns in ({"q": "qery"}, {"q": "query", "a": "query"}):
        with pytest.raises(ValueError, match=r"data\.columns"):
            TrainConfig.model_validate({**base, "data": {"dataset": "rows", "columns": columns}})


def write_csv(path, rows):
    with path.open("w", newline="") as stream:
        table = csv.DictWriter(stream, rows[0])
        table.writeheader()
        table.writerows(rows)


def write_parquet(path, rows):
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)


def write_lines(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def write_gz(path, rows):
    path.write_bytes(gzip.compress(json.dumps(rows).encode()))


def write_folder(path, rows):
    path.mkdir()
    for number, half in enumerate((rows[:20], rows[20:])):
        write_lines(path / f"part-{number}.jsonl", half)


def write_splits(path, rows):
    path.mkdir()
    write_lines(path / "train.jsonl", rows[:30])
    write_lines(path / "test.jsonl", rows[30:])
    (path / "README.md").write_text("Rows.")


def as_text(rows):
    return [{name: json.dumps(value) if name == "messages" else value for name, value in row.items()} for row in rows]


KTO = numbered(ROWS["labelled_messages"])


@pytest.mark.parametrize(
    ("name", "write", "rows", "method"),
    [
        ("rows.csv", write_csv, as_text(KTO), "kto"),
        ("rows.parquet", write_parquet, [{**row, "rejected_response": None} for row in KTO], "kto"),
        ("rows.json.gz", write_gz, numbered(ROWS["sharegpt_preference"]), "dpo"),
        ("rows.ndjson", write_lines, [{**KTO[0], "label": None}, *KTO], "kto"),
        ("rows", write_folder, KTO, "kto"),
        ("rows", write_splits, KTO, "kto"),
    ],
    ids=["CSV", "Parquet with nulls", "gz", "NDJSON whose first row lacks its label", "a folder", "splits"],
)
def test_any_file_or_folder_of_rows_is_read_at_once(lifecycle, tmp_path, model, name, write, rows, method):
    write(tmp_path / name, rows)
    code, said = lifecycle("init", "--data", name, "--model", model, "--folder", "out")
    assert code == 0, said
    shown = read_by_training(tmp_path, tmp_path / "out" / "rows.yaml", method, model)
    assert sum(portion.num_source_rows for portion in shown.portions) == len(rows)
    if write is write_splits:
        assert [portion.num_source_rows for portion in shown.portions] == [30, 10]


@pytest.mark.parametrize(
    ("name", "rows", "problem"),
    [
        ("rows.txt", GSM, "'rows.txt' ends in '.txt'; expected .jsonl, .ndjson, .json, .csv, .parquet"),
        ("rows", GSM, "'rows' has no suffix; expected .jsonl"),
        (
            "a.jsonl",
            [{**SHORT[0], "images": ["x.jpg"]}],
            "expected one in the dataset's folder, or beside the data file",
        ),
        (
            "a.jsonl",
            [{**SHORT[0], "audios": ["x.mp3"]}],
            "has the path 'x.mp3', where there is no file",
        ),
        ("a.jsonl", [{"input_ids": [1, 2]}], "the rows look like tokens"),
        ("a.jsonl", [{"a": 1}], "the first row has the columns `a`, which fit none of the formats"),
        ("a.jsonl", [{**row, "label": True} for row in KTO], "have the same `label`"),
        ("a.jsonl", [*KTO[:3], *[{"messages": 5, "label": True}] * 5], "has 5 bad rows of 8; the first is a.jsonl:4"),
    ],
)
def test_what_cannot_be_learned_is_refused_by_name(lifecycle, tmp_path, model, name, rows, problem):
    code, said = init(lifecycle, tmp_path, rows, "--model", model, name=name)
    assert code == DataError.exit_code and "Traceback" not in said
    assert problem in said
    assert not [*tmp_path.glob("*.yaml")]


def test_a_folder_whose_files_have_no_common_word_is_refused_with_what_to_do(lifecycle, tmp_path):
    (tmp_path / "rows").mkdir()
    for name in ("alice", "bob"):
        write_lines(tmp_path / "rows" / f"{name}.jsonl", GSM)
    code, said = lifecycle("init", "--data", "rows", "--model", "builtin/qwen3-1m")
    assert code == DataError.exit_code
    assert "There are: alice.jsonl, bob.jsonl" in said and "put them into a folder `train`" in said


CALL = {"type": "function", "function": {"name": "add", "arguments": {"a": 1, "b": [1, 2, 3]}}}
ODD = [
    chat("你好,请解释这个定理。" * 20, "这是一个很长的解释。" * 30),
    chat("🙂" * 50, "Ünïcödé " * 40),
    {
        "messages": [
            user("1 + 2?"),
            {"role": "assistant", "content": "", "tool_calls": [CALL]},
            {"role": "tool", "content": "3"},
            assistant("3"),
        ],
        "tools": [{"name": "add", "description": "Adds.", "parameters": {"type": "object", "properties": {"a": {}}}}],
    },
    chat("a", "b"),
    {"messages": [message for n in range(30) for message in (user(str(n)), assistant(str(n)))]},
]


@pytest.mark.parametrize("template", ["chatml-tools", "turns-tools"])
def test_no_tokenizer_of_bytes_makes_more_tokens_than_are_counted_without_one(model, template):
    tokenizer = DocumentTokenizer(model, TEMPLATES / f"{template}.jinja", "assistant")
    reader = RowReader("messages", "examples")
    for row in ODD:
        (document,) = reader.read(row)
        (unit,) = tokenizer.render_units([document])
        assert 0 < sum(map(len, tokenizer.encode(unit))) <= most_tokens(document)
    assert most_tokens(PlainText("é", "a")) >= 5


@pytest.mark.parametrize("source", ["the model's folder", "hf://a/not-here-1b"])
def test_no_row_is_longer_than_the_packed_rows_that_are_written(lifecycle, tmp_path, model, source):
    rows = [ODD[0], ODD[1], *SHORT[:40]]
    code, said = init(lifecycle, tmp_path, rows, "--model", model if source.startswith("the") else source)
    assert code == 0, said
    assert ("lengths are upper bounds for any tokenizer" in said) == source.startswith("hf")
    shown = read_by_training(tmp_path, tmp_path / "my-rows.yaml", "sft", model)
    assert [portion.num_over_long for portion in shown.portions] == [0, 0]


def test_what_is_longer_than_any_row_may_be_is_left_out_and_named(lifecycle, tmp_path, model):
    code, said = init(lifecycle, tmp_path, [chat("a", "é" * 3000), *SHORT], "--model", model)
    assert code == 0 and "rows of more than 2,048 tokens are left out" in said  # the model's positions
    shown = read_by_training(tmp_path, tmp_path / "my-rows.yaml", "sft", model)
    assert sum(portion.num_over_long for portion in shown.portions) == 1


def test_a_template_that_writes_tools_is_taken_where_the_models_own_has_none(lifecycle, tmp_path, model):
    rows = [json.loads(json.dumps(ODD[2]).replace("1 + 2", f"{n} + 2")) for n in range(40)]
    code, said = init(lifecycle, tmp_path, rows, "--model", model)
    assert code == 0 and "templates/chatml-tools.jinja" in said
    shown = read_by_training(tmp_path, tmp_path / "my-rows.yaml", "sft", model)
    assert shown.portions[0].num_bad_rows == 0
    assert "Adds." in "".join(piece.text for piece in shown.rows[0].documents[0].pieces)


def test_every_command_that_the_recipe_names_answers(lifecycle, tmp_path):
    init(lifecycle, tmp_path, SHORT)
    commands = re.findall(r"`lifecycle ([^`]+)`", (tmp_path / "my-rows.yaml").read_text())
    assert len(commands) == 2
    for command in commands:
        code, said = lifecycle(*command.split())
        assert code == 0, said


def test_the_task_asks_what_training_holds_out_and_nothing_else(lifecycle, tmp_path, model):
    init(lifecycle, tmp_path, SHORT, "--model", model)
    questions = [json.loads(line) for line in (tmp_path / "tasks" / "my-rows.jsonl").read_text().splitlines()]
    data = load_recipe(tmp_path / "my-rows.yaml").stages["sft"].data
    training, held_out = (
        {json.dumps(row.content) for row in portion.select(read_rows(tmp_path, [tmp_path / "My rows.v2.jsonl"]))}
        for portion in portions(data)
    )
    asked = {json.dumps(chat(one["question"], one["answer"])) for one in questions}
    assert asked == held_out and not asked & training


@pytest.mark.parametrize(
    ("rows", "output_type"),
    [
        (SHORT, "generate_until"),
        (LONG, "loglikelihood"),
        (TEXTS, "loglikelihood_rolling"),
        (PROMPTS, "generate_until"),
        (numbered(ROWS["sharegpt"] | {"conversations": [human(Q), gpt("{} is so." * 9)]}), "loglikelihood"),
    ],
)
def test_lm_eval_loads_the_task(lifecycle, tmp_path, monkeypatch, model, rows, output_type):
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    from lm_eval.tasks import TaskManager

    init(lifecycle, tmp_path, rows, "--model", model)
    monkeypatch.chdir(tmp_path / "tasks")
    loaded = TaskManager(include_path=str(tmp_path / "tasks"), include_defaults=False).load(["my-rows"])
    (task,) = loaded["tasks"].values()
    assert output_type == task.OUTPUT_TYPE
    document = next(iter(task.test_docs()))
    question, answer = task.doc_to_text(document), task.doc_to_target(document)
    asked = json.dumps(question)[1:-1] in json.dumps(rows) and json.dumps(answer)[1:-1] in json.dumps(rows)
    assert asked and answer and bool(question) == (output_type != "loglikelihood_rolling")
    if rows is PROMPTS:
        (instance,) = (task.construct_requests(document, question, metadata=("my-rows", 0, 1)),)
        instance.resps.append(f"Let me add 1: that makes {answer}.")
        task._instances = [instance]
        task.apply_filters()
        assert task.process_results(document, [instance.filtered_resps["none"]]) == {"exact_match": 1.0}


@pytest.mark.parametrize(
    ("source", "rate"),
    [
        ("hf://Qwen/Qwen3-0.6B", 5e-5),
        ("hf://a/unnamed-1.7b", 2e-5),
        ("hf://a/tiny-30M", 5e-5),
        ("builtin/qwen3-1m", 3e-3),
    ],
)
def test_the_learning_rate_follows_the_size_in_the_models_name(lifecycle, tmp_path, source, rate):
    init(lifecycle, tmp_path, SHORT, "--model", source)
    stage = load_recipe(tmp_path / "my-rows.yaml").stages["sft"]
    assert stage.learning_rate == (rate if stage.adapter is None else pytest.approx(10 * rate))


def test_the_size_of_a_model_on_this_machine_is_that_of_its_config(lifecycle, tmp_path, model):
    named_otherwise = tmp_path / "named-70b"
    named_otherwise.symlink_to(model)
    init(lifecycle, tmp_path, SHORT, "--model", named_otherwise)
    assert re.search(r"usual for [\d.]+M parameters, all of them trained", (tmp_path / "my-rows.yaml").read_text())


def test_an_adapter_learns_where_memory_is_too_small_and_is_merged_and_evaluated(lifecycle, tmp_path):
    code, said = init(lifecycle, tmp_path, SHORT, "--model", "hf://meta-llama/Llama-3.1-405B")
    assert code == 0, said
    stages = load_recipe(tmp_path / "my-rows.yaml").stages
    assert stages["sft"].adapter.rank == 16
    assert stages["merged"].adapter == "sft"
    assert stages["evaluate"].model == stages["promote"].model == "merged"


@pytest.mark.parametrize(
    "source", ["qwen", "file:///nowhere/at/all", "builtin/qwen3-2m", "store://nothing", "hf://nobody"]
)
def test_a_model_that_is_none_is_refused_before_anything_is_read(lifecycle, tmp_path, source):
    code, said = init(lifecycle, tmp_path, [{"a": 1}], "--model", source)
    assert code in (RecipeError.exit_code, ModelError.exit_code) and "Traceback" not in said
    assert "columns" not in said


@pytest.mark.parametrize(("num_rows", "answer", "length"), [(400, "5", 128), (400, "5 " * 400, 1024), (9000, "5", 512)])
def test_few_rows_are_packed_into_short_ones_so_that_there_are_steps_to_learn_in(
    lifecycle, tmp_path, model, num_rows, answer, length
):
    rows = [chat(f"What is {number}?", answer) for number in range(num_rows)]
    init(lifecycle, tmp_path, rows, "--model", model)
    assert load_recipe(tmp_path / "my-rows.yaml").stages["sft"].data.sequence_length == length


def test_bad_rows_are_counted_left_out_and_the_first_is_named(lifecycle, tmp_path, model):
    code, said = init(lifecycle, tmp_path, [SHORT[0], {"messages": []}, {"messages": 5}, *SHORT[1:]], "--model", model)
    assert code == 0
    assert "2 bad rows, which are left out; the first is My rows.v2.jsonl:2 " in said
    shown = read_by_training(tmp_path, tmp_path / "my-rows.yaml", "sft", model)
    assert sum(portion.num_bad_rows for portion in shown.portions) == 2


def test_what_is_there_is_not_written_over(lifecycle, tmp_path, model):
    init(lifecycle, tmp_path, SHORT, "--model", model)
    code, said = init(lifecycle, tmp_path, LONG, "--model", model)
    assert code == RecipeError.exit_code and "exists already" in said
    assert init(lifecycle, tmp_path, LONG, "--model", model, "--folder", "other")[0] == 0


@pytest.mark.parametrize("rows", [[], [{"messages": 5}], [[1]], [{"a": 1}]])
def test_what_holds_no_rows_is_refused(lifecycle, tmp_path, model, rows):
    code, said = init(lifecycle, tmp_path, rows, "--model", model)
    assert code == DataError.exit_code and "Traceback" not in said
    assert lifecycle("init", "--data", "none.jsonl")[0] == DataError.exit_code


@pytest.mark.parametrize("name", ["123", "on", "null", "2024-01", "x'y\"z", "gsm8k"])
def test_a_file_may_have_any_name(lifecycle, tmp_path, model, name):
    (tmp_path / name).mkdir()
    for number in range(2):
        write_lines(tmp_path / name / f"{name}-{number}.jsonl", SHORT[20 * number : 20 * number + 20])
    code, said = lifecycle("init", "--data", name, "--model", model, "--folder", "out")
    assert code == 0, said
    (recipe,) = (tmp_path / "out").glob("*.yaml")
    assert sum(one.num_source_rows for one in read_by_training(tmp_path, recipe, "sft", model).portions) == 40


def test_a_system_message_is_no_template_of_the_task(lifecycle, tmp_path, monkeypatch, model):
    system = {"role": "system", "content": 'Be {{ brief }} {% endraw %}\n"so"'}
    init(lifecycle, tmp_path, [{"messages": [system, *row["messages"]]} for row in SHORT], "--model", model)
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path / "tasks")
    from lm_eval.api.task import ConfigurableTask
    from lm_eval.utils import apply_template

    config = yaml.safe_load((tmp_path / "tasks" / "my-rows.yaml").read_text())
    task = ConfigurableTask(config=config)
    assert apply_template(task.config.description, next(iter(task.test_docs()))) == system["content"]


def test_the_tokenizer_of_a_model_on_a_hub_is_read_without_the_model(lifecycle, tmp_path, monkeypatch, model):
    monkeypatch.delenv("HF_HUB_OFFLINE")
    with running_hub() as hub:
        monkeypatch.setenv("HF_ENDPOINT", hub.url)
        files = {path.name: path.read_bytes() for path in model.iterdir()}
        hub.repository("org/small-7b").commit(files | {"model.safetensors": b"x"})
        code, said = init(lifecycle, tmp_path, SHORT, "--model", "hf://org/small-7b")
    assert code == 0, said
    assert "lengths are the most" not in said
    assert "the longest row has 17 tokens" in (tmp_path / "my-rows.yaml").read_text()
