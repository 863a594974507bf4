"""Builtin models and datasets are reproducible and work; training rows contain no problem of the evaluation task."""

import base64
import io
import json
import re
from importlib import import_module
from pathlib import Path

import pytest
import yaml
from PIL import Image

from stages.hubs.builtin import addition, addition_preferences, calculator, digits, digits_preferences, products
from stages.hubs.builtin.addition import Problem, split_problems
from stages.hubs.builtin.hub import BUILTINS
from stages.kinds.download.builtin import held_out
from stages.models.facts import ModelFacts
from stages.models.model_folder import check_model_folder

TASKS = Path(__file__).parents[4] / "configs" / "tasks"


def rows(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_every_ordered_pair_is_in_exactly_one_split() -> None:
    split = split_problems()
    everything = [*split.test, *split.validation, *split.train]
    assert len(everything) == len(set(everything)) == 10_000
    assert (len(split.test), len(split.validation)) == (addition.NUM_TEST, addition.NUM_VALIDATION)


def test_the_task_holds_the_held_out_problems_and_no_dataset_does(tmp_path: Path) -> None:
    held_out.write_held_out(tmp_path / "addition.jsonl")
    assert (TASKS / "addition.jsonl").read_text() == (tmp_path / "addition.jsonl").read_text()
    test_questions = {row["question"] for row in rows(TASKS / "addition.jsonl")}
    assert len(test_questions) == addition.NUM_TEST
    for number, maker in enumerate((addition, addition_preferences)):
        folder = tmp_path / str(number)
        folder.mkdir()
        maker.make(folder)
        questions = {
            row.get("messages", row.get("prompt"))[0]["content"] for file in folder.iterdir() for row in rows(file)
        }
        assert len(questions) == 10_000 - addition.NUM_TEST
        assert not questions & test_questions


def test_the_task_with_pictures_holds_those_that_no_dataset_has() -> None:
    held_out = rows(TASKS.with_name("digits") / "digits.jsonl")
    assert len(held_out) == digits.NUM_ROWS["test"]
    for drawing, row in zip(digits.drawings("test"), held_out, strict=True):
        assert row["answer"] == drawing.number
        encoded = base64.b64decode(row["image"].removeprefix("data:image/png;base64,"))
        with Image.open(io.BytesIO(encoded)) as image:  # other versions of PIL may pack it otherwise
            assert image.tobytes() == drawing.image.tobytes()


@pytest.mark.parametrize("name", ["addition", "digits", "products"])
def test_the_task_is_found_beside_its_rows(name: str) -> None:
    folder = TASKS.with_name({"addition": "tasks", "products": "calculator"}.get(name, name))
    task = yaml.safe_load((folder / f"{name}.yaml").read_text())
    assert task["task"] == name
    assert (folder / task["dataset_kwargs"]["data_files"]["test"]).is_file()


def test_answers_are_right_and_rejected_ones_wrong_but_plausible(tmp_path: Path) -> None:
    addition_preferences.make(tmp_path)
    for row in rows(tmp_path / "train.jsonl"):
        first, second = row["prompt"][0]["content"].removeprefix("What is ").removesuffix("?").split(" + ")
        right, wrong = (int(row[column][0]["content"]) for column in ("chosen", "rejected"))
        assert right == int(first) + int(second)
        assert wrong != right and wrong >= 0
        assert abs(wrong - right) <= 10 or sorted(str(wrong).zfill(3)) == sorted(str(right).zfill(3))


@pytest.mark.parametrize("problem", [Problem(0, 0), Problem(99, 99), Problem(5, 5), Problem(0, 1)])
def test_the_edges_have_wrong_sums_too(problem: Problem) -> None:
    wrong = addition_preferences.wrong_sums(problem)
    assert wrong and problem.first + problem.second not in wrong


def test_datasets_have_the_same_bytes_every_time(tmp_path: Path) -> None:
    for maker in (addition, addition_preferences):
        contents = []
        for attempt in "ab":
            folder = tmp_path / f"{maker.__name__}-{attempt}"
            folder.mkdir()
            maker.make(folder)
            contents.append({path.name: path.read_bytes() for path in folder.iterdir()})
        assert contents[0] == contents[1]
        assert set(contents[0]) == {"train.jsonl", "validation.jsonl"}


def test_products_are_answered_by_a_call_or_by_heart_and_no_problem_is_in_two_files(tmp_path: Path) -> None:
    questions: list[str] = []
    for number, maker in enumerate((calculator, products)):
        folder = tmp_path / str(number)
        folder.mkdir()
        maker.make(folder)
        for row in (row for file in folder.iterdir() for row in rows(file)):
            question, *_, answer = row["messages"]
            first, second = re.findall(r"\d{3}", question["content"])
            assert int(answer["content"]) == int(first) * int(second) and row["tools"]
            assert any("tool_calls" in message for message in row["messages"]) == (maker is calculator)
            questions.append(question["content"])
    assert len(questions) == len(set(questions)) == 2 * calculator.NUM_PROBLEMS


def test_the_products_that_are_evaluated_are_in_no_training_chat(tmp_path: Path) -> None:
    held_out.write_held_out_products(tmp_path / "products.jsonl")
    file = TASKS.with_name("calculator") / "products.jsonl"
    assert file.read_text() == (tmp_path / "products.jsonl").read_text()
    asked = {row["prompt"]: row["answer"] for row in rows(file)}
    assert len(asked) == calculator.NUM_VALIDATION
    for maker in (calculator, products):
        maker.make(tmp_path)
        assert not asked.keys() & {row["messages"][0]["content"] for row in rows(tmp_path / "train.jsonl")}


def test_pictures_have_the_same_pixels_every_time_and_are_in_one_split_only() -> None:
    names = ("train", "validation", "test")
    few = {split: [digits.Drawing(split, index) for index in range(40)] for split in names}
    pixels = {split: [one.image.tobytes() for one in drawn] for split, drawn in few.items()}
    assert len({one for drawn in pixels.values() for one in drawn}) == 120
    assert pixels["test"] == [one.image.tobytes() for one in few["test"]]


def test_a_wrong_number_differs_in_one_digit() -> None:
    for index in range(100):
        drawing = digits.Drawing("train", index)
        wrong = digits_preferences.wrong_number(drawing)
        assert sum(one != other for one, other in zip(drawing.number, wrong, strict=True)) == 1


def test_rows_with_pictures_name_the_files_beside_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(digits, "NUM_ROWS", {"train": 5, "validation": 3, "test": 1})
    monkeypatch.setattr(digits_preferences, "NUM_PAIRS", {"train": 4, "validation": 2})
    for maker, numbers in ((digits, (5, 3)), (digits_preferences, (4, 2))):
        folder = tmp_path / maker.__name__
        folder.mkdir()
        maker.make(folder)
        for split, number in zip(("train", "validation"), numbers, strict=True):
            made = rows(folder / f"{split}.jsonl")
            assert [one["images"] for one in made] == [[f"{split}/{index}.png"] for index in range(number)]
            for index, one in enumerate(made):
                assert (folder / one["images"][0]).read_bytes() == digits.Drawing(split, index).png
                answer = one.get("messages", one.get("chosen"))[-1]["content"]
                assert answer == digits.Drawing(split, index).number


def test_every_builtin_has_a_maker() -> None:
    assert all(callable(import_module(builtin.module).make) for builtin in BUILTINS.values())


@pytest.fixture(scope="module", params=["qwen3-1m", "qwen3-vl-1m"])
def model_name(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, model_name: str) -> Path:
    folder = tmp_path_factory.mktemp(model_name)
    import_module(BUILTINS[model_name].module).make(folder)
    return folder


@pytest.fixture(scope="module")
def tokenizer(folder: Path):
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folder)


def language_part(folder: Path) -> dict:
    config = json.loads((folder / "config.json").read_text())
    return config.get("text_config", config)


def test_the_model_s_shape_is_known_before_it_is_made(folder: Path, model_name: str) -> None:
    made, known = json.loads((folder / "config.json").read_text()), BUILTINS[model_name].sizes
    if "vl" not in model_name:
        assert ModelFacts(known).shape == ModelFacts(made).shape
        return
    for part in ("text_config", "vision_config"):
        # Transformers itself names the kind of a part.
        assert made[part].items() >= {name: size for name, size in known[part].items() if name != "model_type"}.items()


def test_the_model_is_a_complete_one_of_about_a_million_parameters_as_readable_as_the_mask_says(
    folder: Path,
) -> None:
    from transformers import AutoModel

    check_model_folder(ModelFacts(folder))
    assert 0.5e6 < AutoModel.from_pretrained(folder).num_parameters() < 3e6
    assert len({path.stat().st_mode for path in folder.iterdir()}) == 1


def test_the_model_has_the_same_bytes_every_time(folder: Path, model_name: str, tmp_path: Path) -> None:
    import_module(BUILTINS[model_name].module).make(tmp_path)
    assert {p.name: p.read_bytes() for p in tmp_path.iterdir()} == {p.name: p.read_bytes() for p in folder.iterdir()}


def test_the_model_can_be_quantized_in_groups_of_32(folder: Path) -> None:
    config = language_part(folder)
    attention_dim = config["num_attention_heads"] * config["head_dim"]
    for input_dim in (config["hidden_size"], config["intermediate_size"], attention_dim):
        assert input_dim % 64 == 0, "an even number of groups"
    assert config["num_key_value_heads"] * config["head_dim"] % 32 == 0


@pytest.mark.parametrize("text", ["Größe\n\t 12345 – 東京 🎉", "user\nWhat is  1+2?", "\x00\xff", " leading"])
def test_any_text_survives_the_tokenizer(text: str, tokenizer) -> None:
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text


def test_digits_are_tokens_of_their_own_and_an_exchange_is_short(tokenizer, model_name: str) -> None:
    pair = (digits.question(), "56") if "vl" in model_name else (addition.message("user", "What is 98 + 76?"), "174")
    messages = [pair[0], {"role": "assistant", "content": pair[1]}]
    text = tokenizer.apply_chat_template(messages, tokenize=False)
    ids = tokenizer(text)["input_ids"]
    assert len(ids) <= 18
    assert tokenizer.decode(ids) == text
    tokens = [tokenizer.decode([token]) for token in ids]
    assert [token for token in tokens if any(c.isdigit() for c in token)] == [c for c in text if c.isdigit()]


def test_the_prompt_is_a_prefix_of_the_exchange(tokenizer) -> None:
    messages = [{"role": "user", "content": "What is 1 + 2?"}]
    prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True)["input_ids"]
    whole = tokenizer.apply_chat_template([*messages, {"role": "assistant", "content": "3"}])["input_ids"]
    assert whole[: len(prompt)] == prompt
    assert tokenizer.eos_token_id in whole[len(prompt) :]


def test_every_id_that_the_model_can_produce_has_a_token(folder: Path, tokenizer) -> None:
    vocabulary_size = language_part(folder)["vocab_size"]
    assert len(tokenizer) == vocabulary_size <= 512
    assert None not in tokenizer.convert_ids_to_tokens(range(vocabulary_size))
