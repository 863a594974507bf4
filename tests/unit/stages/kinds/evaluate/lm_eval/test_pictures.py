"""Questions with pictures reach the server as training would show them, and their samples keep no pixels."""

import base64
import io
import json
import threading
from dataclasses import replace
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import datasets
import pytest
from PIL import Image
from transformers import AutoProcessor

from stages.core.errors import EvaluationError
from stages.harnesses.harness import Evaluation
from stages.harnesses.lm_eval.tasks import select_tasks
from stages.harnesses.question_sets import read_questions
from stages.kinds.evaluate.config import EvaluateConfig
from stages.kinds.promote.paired import ASKED_ALIKE
from stages.serving.client import Client
from stages.serving.served_models import ServedModel
from tests.http_server import serving
from tests.unit.stages.data.media.conftest import config_fields, encoded, write_processor
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
        self.processor = AutoProcessor.from_pretrained(model)
        self.bodies: list[dict[str, Any]] = []

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
        choice = {"message": {"content": " ".join(names)}, "finish_reason": "stop"}
        return {"choices": [choice], "prompt_token_ids": [*map(int, ids)]}


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
    evaluation = EvaluateConfig.model_validate(tree | {"apply_chat_template": True}).evaluation
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


def test_a_question_without_room_is_named(model: Path, server: Server, tasks: Path, tmp_path: Path) -> None:
    with pytest.raises(EvaluationError, match=r"sample 0 of the task colors takes up to \d+ tokens .* takes 40"):
        evaluate(asked(tasks, [row("red", "blue")]), model, server, tmp_path / "answers", 40)


@pytest.mark.parametrize("harness", ["judge", "evalscope"])
def test_question_sets_with_pictures_are_refused(tasks: Path, harness: str) -> None:
    question = {"prompt": [{"role": "user", "content": "<image>Which?"}], **row("red")}
    evaluation = asked(tasks, [question], harness=harness)
    with pytest.raises(EvaluationError, match=r"colors\.jsonl:1 has `images`, which this model, or this stage"):
        list(read_questions(evaluation, "colors"))
