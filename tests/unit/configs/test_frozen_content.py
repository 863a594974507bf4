"""Built-in models, data and prompts that enter artifact versions or cache keys may not change.

To change a part, raise the version of the builtin, stage or harness that it belongs to, and let `python -m
tests.unit.configs.test_frozen_content` write `frozen_content.json` again.
"""

import hashlib
import importlib
import json
import tempfile
from pathlib import Path

from flows.planning.plan import plan
from flows.recipe.recipe import load_recipe
from flows.store.content import hash_path
from flows.store.record import Index
from stages.data.any_rows import Prompt
from stages.data.messages import PlainText
from stages.data.proved_template import PROBE_CALL, PROBES
from stages.harnesses.judge.harness import VERSION
from stages.harnesses.question_sets import asked_hashes
from stages.hubs.builtin import qwen3_vl
from stages.hubs.builtin.digits import Drawing, question
from stages.hubs.builtin.digits_preferences import wrong_number
from stages.hubs.builtin.hub import BUILTINS
from stages.hubs.builtin.qwen3 import CHAT_TEMPLATE, make_tokenizer
from stages.kinds.train.teacher import PROBE as TEACHER_PROBE
from stages.rewards.judge import BETTER, RATING, TRIAL, JudgeClient, JudgeReward, PairsConfig, RatingConfig

ROOT = Path(__file__).parents[3]
FROZEN = Path(__file__).with_name("frozen_content.json")
FOLDERS = ("configs/tasks", "configs/templates", "configs/everyday", "configs/digits", "configs/calculator")
JUDGE = {"url": "http://host/v1", "served_model": "wise"}
JUDGES = {
    "rating": RatingConfig.model_validate(JUDGE),
    "pairs": PairsConfig.model_validate(JUDGE),
    "reward": JudgeReward.model_validate({**JUDGE, "type": "judge", "least": 0, "largest": 5}),
    "reward that compares": JudgeReward.model_validate({**JUDGE, "type": "judge", "compare": True}),
}
QUESTION = Prompt(PlainText("What is 1 + 2?", ""), "3", {"question": "What is 1 + 2?", "answer": "3", "é": 0.5})


def digest(value):
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def asked_of(judge, folder):
    """Return the prompt that a judge model gets for a trial completion, and the expected format of the answer."""
    with JudgeClient.opened(judge, folder / "answers.jsonl") as asked:
        return [asked._questions(TRIAL), asked._expected]


def contents(folder):
    """Return digests (short contents: themselves) of tasks, templates, builtins and judge prompts, by name."""
    found = {}
    for name in FOLDERS:
        found[name] = hash_path(ROOT / name)
        for file in sorted((ROOT / name).iterdir()):
            found[f"{name}/{file.name}"] = hash_path(file)
    for name, builtin in BUILTINS.items():
        found[f"builtin {name}"] = {"version": builtin.version, "sizes": digest(builtin.sizes)}
        if builtin.product == "dataset" and not name.startswith("digits"):
            (folder / name).mkdir()
            importlib.import_module(builtin.module).make(folder / name)
            found[f"builtin {name}"]["rows"] = hash_path(folder / name)
    vocabulary = make_tokenizer().get_vocab()
    found["builtin qwen3-1m"] |= {"vocabulary": digest(vocabulary), "template": digest(CHAT_TEMPLATE)}
    drawn = [Drawing("train", index) for index in range(100)]  # of thousands, which take seconds
    found["builtin digits"]["rows"] = digest([question(), [[one.number, one.image.tobytes().hex()] for one in drawn]])
    found["builtin digits-preferences"]["rows"] = digest([*map(wrong_number, drawn)])
    seen = {"vocabulary": digest(qwen3_vl.make_tokenizer().get_vocab()), "template": digest(qwen3_vl.CHAT_TEMPLATE)}
    found["builtin qwen3-vl-1m"] |= seen
    found |= {f"judge: {name}": digest([judge.asked, asked_of(judge, folder)]) for name, judge in JUDGES.items()}
    found["judge: reads"] = digest([RATING.pattern, BETTER.pattern])
    found["judge: version"] = VERSION
    found["hashes of a question"] = asked_hashes(QUESTION)
    found["probes"] = digest([TEACHER_PROBE, PROBES, PROBE_CALL])
    return found


def outside_of(config):
    """Return the hashes of what a stage reads from outside the store; a constant for downloads from hubs.

    Versions of installed programs are left out.
    """
    paths = {field: hash_path(path) for field, path in config.outside_paths().items()}
    if config.kind != "download":
        return paths
    is_builtin = config.source.hub == "builtin"
    return {**paths, **(config.resolve_outside() if is_builtin else {"revision": "recorded"})}


def versions():
    """Return the artifact versions of all recipes under `configs/`, computed with the project's real files."""
    found = {}
    for path in sorted((ROOT / "configs").glob("*.yaml")):
        recipe = load_recipe(path)
        planned = plan(recipe, {name: outside_of(config) for name, config in recipe.stages.items()}, Index(()))
        found[f"versions of {path.stem}"] = {name: stage.version for name, stage in planned.stages.items()}
    return found


def test_content_that_identifies_artifacts_is_the_frozen_one(tmp_path):
    assert {**contents(tmp_path), **versions()} == json.loads(FROZEN.read_text())


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as name:
        FROZEN.write_text(json.dumps({**contents(Path(name)), **versions()}, indent=1) + "\n")
