"""Questions with pictures reach the server as training would show them, and their samples keep no pixels."""

import base64
import io
import json
import threading
import zlib
from contextlib import nullcontext
from dataclasses import replace
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import datasets
import pytest
from PIL import Image
from transformers import AutoProcessor

from stages.core.contract import StageContext, StageInput
from stages.core.errors import DataError, EvaluationError, ServerError
from stages.harnesses.harness import Evaluation
from stages.harnesses.judge.harness import Judge
from stages.harnesses.lm_eval.tasks import select_tasks
from stages.harnesses.registry import HARNESSES
from stages.kinds.evaluate.check import check
from stages.kinds.evaluate.config import EvaluateConfig
from stages.kinds.evaluate.run import _write
from stages.kinds.promote.judged_pairs import judged_pairs
from stages.kinds.promote.paired import ASKED_ALIKE, compare
from stages.models.start_up import find_torchvision
from stages.rewards.judge import PairsConfig, RatingConfig
from stages.serving.client import Client
from stages.serving.served_models import ServedModel
from tests.http_server import serving
from tests.judge_server import KEY, MODEL, answer_in, judge_server
from tests.unit.stages.data.media.conftest import config_fields, encoded, sound, video, write_processor
from tests.zoo.models import tiny_config

COLORS = {"red": (255, 0, 0), "blue": (0, 0, 255), "lime": (0, 255, 0)}
TASK = """
task: colors
dataset_path: json
dataset_kwargs: {data_files: {test: colors.jsonl}}
test_split: test
doc_to_image: [images]
doc_to_text: "{{question}}"
doc_to_target: "{{answer}}"
generation_kwargs: {until: ["."], max_gen_toks: 8, temperature: 0}
metric_list: [{metric: exact_match, aggregation: mean, higher_is_better: true}]
"""
PLACED = "First <image>, then <image>?"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("seeing")
    write_processor(folder)
    tiny_config("gemma3", **config_fields(folder)).save_pretrained(folder)
    return folder


class Server:
    """Server that names the colours of a chat's pictures in order, and the tokens that Transformers makes of it."""

    def __init__(self, model: Path) -> None:
        find_torchvision()
        self.processor = AutoProcessor.from_pretrained(model)
        self.bodies: list[dict[str, Any]] = []
        self.letters = {"red blue": "ANSWER: A", "lime blue": "ANSWER: A"}  # to questions with options

    def answer(self, body: dict[str, Any]) -> dict[str, Any]:
        self.bodies.append(body)
        (message,) = body["messages"]
        images = [
            Image.open(io.BytesIO(base64.b64decode(part["image_url"]["url"].partition(",")[2])))
            for part in message["content"]
            if part["type"] == "image_url"
        ]
        seen = [{"type": "image"} if part["type"] == "image_url" else part for part in message["content"]]
        text = self.processor.apply_chat_template([{**message, "content": seen}], add_generation_prompt=True)
        ids = self.processor(text=[text], images=[images], add_special_tokens=False)["input_ids"][0]
        names = [name for image in images for name, color in COLORS.items() if image.getpixel((3, 3)) == color]
        named = " ".join(names)
        said = self.letters.get(named, named) if "ANSWER:" in text else named
        choice = {"message": {"role": "assistant", "content": said}, "finish_reason": "stop"}
        return {"model": "tiny", "choices": [{"index": 0, **choice}], "prompt_token_ids": [*map(int, ids)]}


@pytest.fixture(scope="module")
def server(model: Path) -> Any:
    state = Server(model)

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            assert self.path == "/v1/chat/completions"
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            with lock:
                answer = json.dumps(state.answer(body)).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(answer)))
            self.end_headers()
            self.wfile.write(answer)

        def log_message(self, *_: object) -> None:
            pass

    lock = threading.Lock()
    with serving(Handler) as state.url:
        yield state


@pytest.fixture
def tasks(tmp_path: Path) -> Path:
    folder = tmp_path / "tasks"
    (folder / "pictures").mkdir(parents=True)
    for name, color in COLORS.items():
        (folder / "pictures" / f"{name}.png").write_bytes(encoded(Image.new("RGB", (40, 24), color)))
    (folder / "colors.yaml").write_text(TASK)
    return folder


def asked(folder: Path, rows: list[dict[str, Any]], **fields: Any) -> Evaluation:
    if rows:
        (folder / "colors.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    tree = {"kind": "evaluate", "model": "sft", "tasks": ["colors"], "task_folder": str(folder)}
    evaluation = EvaluateConfig.model_validate(
        tree | {"apply_chat_template": True, "generation": {"max_tokens": 8}}
    ).evaluation
    return replace(evaluation, **{"max_images": 2, **fields})


def evaluate(evaluation: Evaluation, model: Path, server: Server, answers: Path, context_tokens: int = 256) -> Any:
    from stages.harnesses.lm_eval.scoring import LmEvalModel, evaluate_tasks, load_tasks

    loaded = load_tasks(select_tasks(evaluation.tasks, evaluation.task_folder), evaluation)
    lm = LmEvalModel(ServedModel(Client(server.url, "key", "tiny"), model, context_tokens, False), evaluation)
    server.bodies.clear()
    results = evaluate_tasks(lm, loaded, evaluation, answers, lambda *_: None)
    assert lm.num_asked_otherwise == 0
    return results["results"]["colors"]["exact_match,none"], results["samples"]["colors"]


def row(*names: str, question: str = PLACED) -> dict[str, Any]:
    return {"question": question, "images": [f"pictures/{name}.png" for name in names], "answer": " ".join(names)}


def address(path: Path) -> str:
    return f"data:image/png;base64,{base64.b64encode(path.read_bytes()).decode()}"


def test_pictures_stand_where_the_text_has_them(model: Path, server: Server, tasks: Path, tmp_path: Path) -> None:
    rows = [row("red", "blue"), row("lime", question="Which?"), row("blue", "lime")]
    score, samples = evaluate(asked(tasks, rows), model, server, tmp_path / "answers")
    assert score == 1
    contents = [body["messages"][0]["content"] for body in server.bodies]
    placed, before = (
        next(one for one in contents if one[-1]["text"] == last) for last in ("?", "Which?")
    )  # they arrive in any order
    assert [part.get("text", part["type"]) for part in placed] == ["First ", "image_url", ", then ", "image_url", "?"]
    assert [part.get("text", part["type"]) for part in before] == ["image_url", "Which?"]
    assert "<image>" not in json.dumps(server.bodies)
    assert [one["path"] for one in samples[0]["media"]] == ["pictures/red.png", "pictures/blue.png"]
    assert server.bodies[0]["stop"] == ["."] and server.bodies[0]["max_tokens"] == 8
    # Another attempt asks nothing again, a changed picture is another question.
    assert evaluate(asked(tasks, rows), model, server, tmp_path / "answers")[0] == 1
    assert not server.bodies
    (tasks / "pictures" / "red.png").write_bytes((tasks / "pictures" / "lime.png").read_bytes())
    score, changed = evaluate(asked(tasks, rows), model, server, tmp_path / "answers")
    assert len(server.bodies) == 1 and score == pytest.approx(2 / 3)
    assert [[old[key] != new[key] for key in ASKED_ALIKE] for old, new in zip(samples, changed, strict=True)] == [
        [False, False, True], [False] * 3, [False] * 3,
    ]  # fmt: skip


def test_the_forms_of_pictures_are_one(model: Path, server: Server, tasks: Path, tmp_path: Path) -> None:
    rows = [row("red", "blue"), row("blue", "lime")]
    inside = [{**one, "images": [address(tasks / path) for path in one["images"]]} for one in rows]
    _, of_paths = evaluate(asked(tasks, rows), model, server, tmp_path / "paths")
    score, of_rows = evaluate(asked(tasks, inside), model, server, tmp_path / "rows")
    cells = [[{"bytes": (tasks / path).read_bytes(), "path": None} for path in one["images"]] for one in rows]
    table = datasets.Dataset.from_list([{**one, "images": cell} for one, cell in zip(rows, cells, strict=True)])
    table.cast_column("images", datasets.List(datasets.Image())).to_parquet(tasks / "colors.parquet")
    (tasks / "colors.yaml").write_text(TASK.replace(": json", ": parquet").replace(".jsonl", ".parquet"))
    parquet_score, of_parquet = evaluate(asked(tasks, []), model, server, tmp_path / "parquet")
    assert score == parquet_score == 1
    found = [
        [[one["sha256"] for one in sample["media"]] for sample in form] for form in (of_paths, of_rows, of_parquet)
    ]
    assert found[0] == found[1] == found[2]
    assert [one["path"] for one in of_rows[1]["media"]] == ["colors.jsonl#2"] * 2
    assert [one["path"] for one in of_parquet[1]["media"]] == ["colors.parquet#2"] * 2
    assert "base64" not in json.dumps([of_rows, of_parquet], default=str)
    assert all(len(json.dumps(sample, default=str)) < 3000 for sample in of_rows + of_parquet)


@pytest.mark.parametrize("max_images", [1, 2])
def test_more_pictures_than_the_server_takes_are_refused_before_any_model_is_trained(
    tasks: Path, model: Path, tmp_path: Path, max_images: int
) -> None:
    asked(tasks, [row("red", "blue")])
    (tmp_path / "base").mkdir()
    (tmp_path / "base" / "model").symlink_to(model)
    config = {"kind": "evaluate", "model": "base", "tasks": ["colors"], "task_folder": str(tasks)}
    config |= {"apply_chat_template": True, "serving": {"max_images": max_images}}
    inputs, cache = {"base": tmp_path / "base"}, tmp_path / "cache"
    stage = StageInput(name="e", kind="evaluate", version="0" * 12, config=config, inputs=inputs, cache=cache)
    message = (
        "sample 0 of the task colors has 2 pictures, and the server takes at most 1 in one request; raise "
        "`serving.max_images`"
    )
    found = [(field, message in str(problem)) for field, problem in check(stage)]
    assert found == ([("tasks", True)] if max_images == 1 else [])


@pytest.mark.parametrize(
    ("rows", "fields", "yaml", "message"),
    [
        ([row("red", "blue")], {"max_images": 1}, "", "sample 0 of the task colors has 2 pictures, .* at most 1"),
        ([row("red", "blue")], {"max_images": 0}, "", "the task colors has pictures, and the model reads text alone"),
        ([row("red")], {}, "", "has 1 image, but 2 places|a place for image 2"),
        ([row()], {}, "", "has `<image>` in its text, and no such medium"),
        ([row("gone", question="Which?")], {}, "", "pictures/gone.png', where there is no file"),
        ([row("red")], {"apply_chat_template": False}, "", "which only a chat has a place for"),
        ([row("red")], {"num_fewshot": 2}, "fewshot_split: test", "2 few-shot examples, whose pictures"),
        ([row("red")], {}, "output_type: multiple_choice\ndoc_to_choice: [red]", "compares log-likelihoods"),
    ],
)  # fmt: skip
def test_what_cannot_be_asked_is_refused(
    tasks: Path, model: Path, rows: list[dict[str, Any]], fields: dict[str, Any], yaml: str, message: str
) -> None:
    from stages.harnesses.lm_eval.rehearsal import rehearse

    (tasks / "colors.yaml").write_text(TASK + yaml + "\n")
    evaluation = asked(tasks, rows, **fields)
    with pytest.raises(EvaluationError, match=message):
        rehearse(select_tasks(evaluation.tasks, evaluation.task_folder), evaluation, model)


@pytest.mark.parametrize(
    ("kinds", "message"),
    [
        (["video", "audio"], ""),
        (["video"], "the task colors has sounds, with which the model is not served"),
        (["image"], "the task colors has videos, with which the model is not served"),
    ],
)
def test_sounds_and_videos_are_asked_with_where_they_are_served(tasks: Path, kinds: list[Any], message: str) -> None:
    from stages.harnesses.lm_eval.rehearsal import rehearse

    (tasks / "a.wav").write_bytes(sound())
    (tasks / "a.mp4").write_bytes(video())
    columns = "doc_to_audio: [sounds]\nmetadata: {version: 1, doc_to_video: film}"
    (tasks / "colors.yaml").write_text(TASK.replace("doc_to_image: [images]", columns))
    rows = [{"question": "<video>or<audio>?", "sounds": ["a.wav"], "film": "a.mp4", "answer": "a"}]
    evaluation = asked(tasks, rows, media_kinds=frozenset(kinds))
    with pytest.raises(EvaluationError, match=message) if message else nullcontext():
        rehearse(select_tasks(evaluation.tasks, evaluation.task_folder), evaluation, None)


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("task", "metric"), [("colors", "exact_match"), ("general_vqa", "Rouge-L-R"), ("general_vmcq", "accuracy")]
)
def test_evalscope_shows_pictures_of_own_rows(
    model: Path, server: Server, tasks: Path, tmp_path: Path, task: str, metric: str
) -> None:
    rows = [question_row("red", "blue"), {**question_row("lime", "blue"), "answer": "green"}]
    if metric == "accuracy":
        rows = [
            {**row, "options": ["red blue", "green"], "answer": letter} for row, letter in zip(rows, "AB", strict=True)
        ]
    (tasks / f"{task}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    evaluation = asked(tasks, [], harness="evalscope", tasks=(task,))
    context = StageContext(tmp_path / "work", "work", "0" * 12, {}, {}, tmp_path / "cache")
    context.work.mkdir()
    harness = HARNESSES["evalscope"]
    harness.prepare(evaluation, context.cache)
    server.bodies.clear()
    results = harness.evaluate(
        evaluation, context, lambda: ServedModel(Client(server.url, "key", "tiny"), model, 256, False)
    )
    first, second = results.samples[task]
    shown = json.dumps(server.bodies)
    assert all(address(tasks / f"pictures/{name}.png") in shown for name in COLORS) and "<image>" not in shown
    said = server.letters if metric == "accuracy" else {}
    assert [row["resps"] for row in (first, second)] == [[[said.get(one, one)]] for one in ("red blue", "lime blue")]
    assert first[metric] == 1 > second[metric]
    assert first["question"] == PLACED and [one["path"] for one in second["media"]] == second["doc"]["images"]
    kept = json.dumps(results.samples) + "".join(file.read_text() for file in context.work.rglob("*.json*"))
    assert ";base64," not in kept and str(tmp_path / "work") not in json.dumps(results.samples)


@pytest.mark.parametrize("form", ["one", "list", "parts"])
def test_a_bomb_in_the_first_row_is_refused_by_its_header(tasks: Path, model: Path, form: str) -> None:
    from stages.harnesses.lm_eval.rehearsal import rehearse

    # Its header claims 169 million pixels, which `datasets` would decode when lm-eval looks at the first row.
    data = encoded(Image.new("1", (8, 8)))
    header = b"IHDR" + (13_000).to_bytes(4) + (13_000).to_bytes(4) + data[24:29]
    bomb = {"bytes": data[:12] + header + zlib.crc32(header).to_bytes(4) + data[33:], "path": None}
    cells, feature = {
        "one": (bomb, datasets.Image()),
        "list": ([bomb], datasets.List(datasets.Image())),
        "parts": ([{"image": bomb}], datasets.List({"image": datasets.Image()})),
    }[form]
    features = datasets.Features({"question": datasets.Value("string"), "images": feature})
    table = datasets.Dataset.from_list([{"question": "Which?", "images": cells}]).cast(features)
    table.to_parquet(tasks / "colors.parquet")
    task = TASK.replace(": json", ": parquet").replace(".jsonl", ".parquet").replace("{{answer}}", "red")
    shown = '"{{images[0].image}}"' if form == "parts" else "[images]"
    (tasks / "colors.yaml").write_text(task.replace("[images]", shown))
    evaluation = asked(tasks, [])
    with pytest.raises(
        EvaluationError, match="13000 × 13000 pixels; expected at most" if form != "parts" else "sample 0"
    ):
        rehearse(select_tasks(evaluation.tasks, evaluation.task_folder), evaluation, model)


def test_a_question_without_room_is_named(model: Path, server: Server, tasks: Path, tmp_path: Path) -> None:
    with pytest.raises(EvaluationError, match=r"sample 0 of the task colors takes up to \d+ tokens .* takes 40"):
        evaluate(asked(tasks, [row("red", "blue")]), model, server, tmp_path / "answers", 40)


def question_row(*names: str) -> dict[str, Any]:
    return {"prompt": PLACED, **row(*names)}


@pytest.fixture
def judged(model: Path, server: Server, tasks: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Provide a judge's server, and a function that evaluates the model with it on rows of question sets."""
    monkeypatch.setenv("CRITIC_KEY", KEY)
    with judge_server() as judge:
        judge.max_images = 2

        def evaluate(*rows: dict[str, Any], name: str = "work", **fields: Any) -> tuple[Any, Path]:
            config = {"url": judge.url, "served_model": MODEL, "key_variable": "CRITIC_KEY"}
            evaluation = asked(tasks, [*rows], harness="judge", judge=RatingConfig(**config), **fields)
            context = StageContext(tmp_path / name, name, "0" * 12, {}, {}, tmp_path / "cache")
            context.work.mkdir(exist_ok=True)
            recorded = {"name": name, "kind": "evaluate", "version": "0" * 12, "config": {"task_folder": str(tasks)}}
            (context.work / "config.json").write_text(json.dumps({**recorded, "inputs": {}, "cache": str(tmp_path)}))
            server.bodies.clear()
            Judge().check(evaluation, tmp_path, None)
            served = ServedModel(Client(server.url, "key", "tiny"), model, 256, False)
            results = Judge().evaluate(evaluation, context, lambda: served)
            _write(context.work, results)
            return results, context.work

        yield judge, evaluate


def test_a_judge_sees_the_pictures_of_questions(judged: Any, server: Server, tasks: Path) -> None:
    judge, evaluate = judged
    judge.says = lambda question: f"Rating: {9 if answer_in(question) == 'red blue' else 2}"
    pixels = [address(tasks / f"pictures/{name}.png") for name in ("lime", "blue")]
    inside = {**question_row("lime", "blue"), "images": pixels}
    results, work = evaluate(question_row("red", "blue"), inside)
    assert results.scores["results"]["colors"]["rating,none"] == pytest.approx(5.5)
    (message,) = next(one["messages"] for one in judge.asked if "The answer:\\nred" in json.dumps(one))
    begin, first, between, second, last = message["content"]
    assert [part["image_url"]["url"] for part in (first, second)] == [
        address(tasks / "pictures/red.png"), address(tasks / "pictures/blue.png"),
    ]  # fmt: skip
    assert begin["text"].endswith("First ") and between["text"] == ", then "
    assert last["text"].startswith("?\n\nThe answer:\nred blue")
    first, second = results.samples["colors"]
    assert first["question"] == PLACED
    assert [one["path"] for one in first["media"]] == ["pictures/red.png", "pictures/blue.png"]
    assert [one["path"] for one in second["media"]] == ["colors.jsonl#2"] * 2
    written = "".join(file.read_text() for file in work.rglob("*.jsonl"))
    assert "base64" not in written and first["media"][0]["sha256"] in (work / "judge.jsonl").read_text()
    # Another attempt asks nothing but the trial again.
    judge.asked.clear()
    evaluate(question_row("red", "blue"), inside)
    assert len(judge.asked) == 3 and not server.bodies


def test_two_models_answers_to_pictures_are_paired_and_compared_by_a_judge(
    judged: Any, tasks: Path, tmp_path: Path
) -> None:
    judge, evaluate = judged
    judge.says = lambda question: f"Rating: {9 if answer_in(question) == 'red blue' else 2}"
    rows = [question_row("red", "blue"), question_row("lime", "blue")]
    (_, ours), (_, theirs) = evaluate(*rows, name="ours"), evaluate(*rows, name="theirs")
    (difference,) = compare([ours], [theirs])
    assert (difference.num_samples, difference.num_unpaired, difference.difference) == (2, 0, 0)
    judge.asked.clear()
    judge.says = lambda question: "Better: A"
    pairs = PairsConfig(url=judge.url, served_model=MODEL, key_variable="CRITIC_KEY")
    context = StageContext(tmp_path / "promote", "promote", "0" * 12, {}, {}, tmp_path / "cache")
    context.work.mkdir()
    assert judged_pairs(pairs, [ours], [theirs], context).metrics["colors.win_rate"] == 0.5
    shown = json.dumps(judge.asked)
    assert all(address(tasks / f"pictures/{name}.png") in shown for name in COLORS)
    assert "<image>" not in shown and "base64" not in (context.work / "judge.jsonl").read_text()
    # A picture that is another now is no longer what the models saw, and a changed one is another question.
    (tasks / "pictures" / "red.png").write_bytes((tasks / "pictures" / "lime.png").read_bytes())
    with pytest.raises(EvaluationError, match=r"pictures/red\.png .* has changed"):
        judged_pairs(pairs.model_copy(update={"template": "{prompt} {first} {second}"}), [ours], [theirs], context)
    judge.says = lambda question: "Rating: 2"
    _, changed = evaluate(*rows, name="changed")
    with pytest.raises(EvaluationError, match="colors"):
        compare([changed], [theirs])


@pytest.mark.parametrize(
    ("takes", "fields", "error", "message"),
    [
        (0, {}, ServerError, r"critic-1 at http\S+ takes no question with 2 pictures, .* take a judge that sees"),
        (1, {}, ServerError, "takes no question with 2 pictures"),
        (2, {"max_images": 1}, EvaluationError, r"colors\.jsonl:1 has 2 pictures, .* at most 1"),
        (2, {"max_images": 0}, EvaluationError, "has pictures, and the model reads text alone"),
    ],
)
def test_questions_with_pictures_that_cannot_be_judged_are_refused(
    judged: Any, server: Server, takes: int, fields: dict[str, Any], error: type[Exception], message: str
) -> None:
    judge, evaluate = judged
    judge.max_images = takes
    with pytest.raises(error, match=message):
        evaluate(question_row("red", "blue"), **fields)
    assert not server.bodies


def test_a_judge_that_ignores_pictures_is_refused(judged: Any, server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    judge, evaluate = judged
    judge.tokens_of_picture = 0
    with pytest.raises(DataError, match=r"critic-1 .* counts 90 tokens .* and 90 in it without: it leaves them out"):
        evaluate(question_row("red", "blue"))
    assert not server.bodies


@pytest.mark.parametrize("wrong", [{"options": ["red"]}, {"options": "AB"}, {"answer": "C"}, {"answer": "red"}])
def test_questions_with_options_have_a_letter_as_their_answer(tasks: Path, wrong: dict[str, Any]) -> None:
    from stages.harnesses.evalscope.running import read_answered

    row = {**question_row("red", "blue"), "options": ["red", "blue"], "answer": "A"}
    (tasks / "general_vmcq.jsonl").write_text(json.dumps(row) + "\n" + json.dumps({**row, **wrong}) + "\n")
    with pytest.raises(EvaluationError, match="question 2 is none with options; expected one message of a user"):
        read_answered(asked(tasks, [], harness="evalscope", tasks=("general_vmcq",)), "general_vmcq")
