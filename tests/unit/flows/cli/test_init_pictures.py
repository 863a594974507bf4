"""`lifecycle init` for rows with pictures: a recipe that downloads them, and a task that asks about those held out."""

import json
import re
from dataclasses import replace

import pytest
import yaml

from flows.planning.survey import KnownModel, survey
from stages.harnesses.lm_eval.rehearsal import rehearse
from stages.harnesses.lm_eval.tasks import select_tasks
from stages.kinds.evaluate.config import EvaluateConfig
from tests.unit.flows.cli.test_init import chat, lifecycle, model  # noqa: F401
from tests.unit.stages.data.media.conftest import NUM_TOKENS, config_fields, encoded, noise, write_processor
from tests.unit.stages.kinds.train import test_videos as videos
from tests.zoo.models import tiny_config


def seeing_and_pictures(root):
    """Write a model that sees without weights, and a folder with eight pictures; return both folders."""
    seeing, folder = root / "seeing", root / "rows"
    seeing.mkdir()
    folder.mkdir()
    write_processor(seeing)
    tiny_config("gemma3", **config_fields(seeing)).save_pretrained(seeing)
    for number in range(8):
        (folder / f"{number}.png").write_bytes(encoded(noise(seed=number)))
    return seeing, folder


def test_rows_with_pictures_get_a_recipe_that_downloads_them_and_asks_about_them(lifecycle, tmp_path, model):  # noqa: F811
    seeing, folder = seeing_and_pictures(tmp_path)
    rows = [{**chat(f"<image>What is {n}?", "It is noise."), "images": [f"{n % 8}.png"]} for n in range(40)]
    rows += [{**chat(f"<image>Describe {n}!", "Noise, and noise again. " * 9), "images": ["0.png"]} for n in range(9)]
    (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    code, output = lifecycle("init", "--folder", "out", "--data", folder, "--model", seeing)
    assert code == 0, output
    (written,) = (tmp_path / "out").glob("*.yaml")
    recipe = yaml.safe_load(written.read_text())
    assert recipe["stages"]["rows"] == {"kind": "download", "dataset": f"file://{folder}", "media": True}
    assert recipe["stages"]["evaluate"]["serving"]["max_images"] == 1
    assert recipe["stages"]["promote"].get("baselines") == ["evaluate-base"] and "evaluate-base" in recipe["stages"]
    (questions,) = (tmp_path / "out" / "tasks").glob("*.jsonl")
    asked = [json.loads(line) for line in questions.read_text().splitlines()]
    assert asked and all(one["question"].startswith("<image>What is") for one in asked)
    for one in asked:
        (picture,) = one["images"]
        (number,) = re.findall(r"\d+", one["question"])
        source = folder / f"{int(number) % 8}.png"
        assert (tmp_path / "out" / "tasks" / picture).read_bytes() == source.read_bytes()
    evaluation = EvaluateConfig.model_validate(
        {**recipe["stages"]["evaluate"], "task_folder": str(tmp_path / "out" / "tasks")}
    ).evaluation
    evaluation = replace(evaluation, apply_chat_template=True, max_images=1)
    rehearse(select_tasks(evaluation.tasks, evaluation.task_folder), evaluation, seeing)
    code, output = lifecycle("init", "--folder", "other", "--data", folder, "--model", model)
    assert code
    assert "has no processor; name a model that reads them" in output
    code, output = lifecycle("init", "--folder", "other", "--data", folder)
    assert code
    assert "Qwen3-0.6B reads text alone; name a model that reads them (`--model`)" in output
    code, output = lifecycle("init", "--folder", "third", "--data", folder / "train.jsonl", "--model", seeing)
    assert code
    assert f"expected the folder that holds both, so that they are downloaded together (`--data {folder}`)" in output


@pytest.fixture
def seeing_rows(tmp_path):
    """Provide a model that sees, and a function that writes rows beside their pictures and surveys them for it."""
    seeing, folder = seeing_and_pictures(tmp_path)

    def surveyed(rows):
        lines = (json.dumps({**row, "images": [f"{n % 8}.png"]}) + "\n" for n, row in enumerate(rows))
        (folder / "train.jsonl").write_text("".join(lines))
        return survey(folder, {}, KnownModel(f"file://{seeing}", folder=seeing))

    return surveyed


ASKED = [[{"role": "user", "content": f"<image>What is {number}?"}] for number in range(40)]
GOOD, BAD = ([{"role": "assistant", "content": text}] for text in ("It is noise.", "It is a cat."))
KINDS = {
    "prompts": [{"prompt": asked, "answer": "noise"} for asked in ASKED],
    "pairs": [{"prompt": asked, "chosen": GOOD, "rejected": BAD} for asked in ASKED],
    "labelled": [
        {"prompt": asked, "completion": GOOD if number % 2 else BAD, "label": bool(number % 2)}
        for number, asked in enumerate(ASKED)
    ],
}


@pytest.mark.parametrize("kind", KINDS)
def test_rows_of_all_kinds_are_surveyed_with_their_pictures(seeing_rows, kind):
    facts = seeing_rows(KINDS[kind])
    assert (facts.kind, facts.media_kinds, facts.num_rows, facts.num_bad_rows) == (kind, {"image"}, 40, 0), (
        facts.first_bad
    )
    assert facts.is_counted and facts.longest > NUM_TOKENS * (2 if kind == "pairs" else 1)
    assert facts.questions and all(one["question"].startswith("<image>What is") for one in facts.questions)
    assert {name for one in facts.questions for name in one["images"]} == facts.pictures.keys()


def test_a_first_recipe_names_the_frames_of_videos_that_the_model_leaves_open(tmp_path):
    inputs = videos.inputs._get_wrapped_function()(tmp_path)
    folder, source = inputs["rows"] / "data", inputs["base"] / "model"
    videos.write_rows(folder, videos.ASKED * 10, "completion")
    facts = survey(folder, {}, KnownModel(f"file://{source}", folder=source))
    assert (facts.media_kinds, facts.bounds.named) == ({"image", "video"}, {"fps": 2.0, "max_frames": 32})
    assert facts.is_counted and facts.num_bad_rows == 0
