"""Prompts with pictures are what the processor makes of them, asked of an engine that reads the same, and go on."""

import base64
import hashlib
import json
import os
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler
from socketserver import ThreadingUnixStreamServer

import pytest
from PIL import Image
from transformers import AutoProcessor

from stages.core.errors import DataError, ServerError
from stages.data.files import Portion
from stages.data.formats import RowReader
from stages.data.media.folder import MediaFolder
from stages.kinds.generate import selection
from stages.kinds.generate.run import ScoredPrompt, _with_pictures
from stages.kinds.train.rollouts.rounds import _completion
from stages.rollouts.asking import Sample, ask_all
from stages.rollouts.look import look_at_prompts
from stages.rollouts.options import PromptOptions
from stages.rollouts.prompts import check_pictures, media_of, read_prompts
from stages.serving.client import Choice, Client, TokenLogProbs
from stages.serving.server import reached_engine
from stages.serving.vllm.engine import Vllm
from tests.unit.stages.data.media.conftest import BEGIN, PICTURE, pictures, seeing_folder  # noqa: F401 (fixtures)

OPTIONS = PromptOptions(Portion("training", "train"), None, None, "prompts.reference", None, True, {})
PARTS = [{"type": "image"}, {"type": "text", "text": "Which?"}]
ANSWER = [{"role": "assistant", "content": "red"}]
FORMS = {
    "TRL": {"prompt": [{"role": "user", "content": PARTS}], "images": ["a.png"]},
    "TRL without parts": {"prompt": [{"role": "user", "content": "Which?"}], "images": ["a.png"]},
    "ms-swift": {"messages": [{"role": "user", "content": "<image>Which?"}, *ANSWER], "images": ["a.png"]},
    "OpenAI": {
        "messages": [
            {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "a.png"}}, PARTS[1]]},
            *ANSWER,
        ]
    },
    "pairs": {
        "prompt": [{"role": "user", "content": "<image>Which?"}],
        **{"chosen": ANSWER, "rejected": [{"role": "assistant", "content": "blue"}], "images": ["a.png"]},
    },
}


def read(folder, rows, model):
    (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return read_prompts(folder, OPTIONS, model, media_of(folder, "train", model))


@pytest.fixture
def prompt(pictures, seeing_folder):  # noqa: F811
    (one,) = read(pictures("a.png"), [FORMS["TRL"]], seeing_folder)
    return one


def test_prompts_of_all_forms_are_the_processors_tokens(pictures, seeing_folder):  # noqa: F811
    folder = pictures("a.png")
    prompts = read(folder, FORMS.values(), seeing_folder)
    processor = AutoProcessor.from_pretrained(seeing_folder)
    text = processor.apply_chat_template([{"role": "user", "content": PARTS}], add_generation_prompt=True)
    with Image.open(folder / "a.png") as image:
        expected = processor(text=[text], images=[[image]], add_special_tokens=False)["input_ids"][0]
    assert [one.token_ids for one in prompts] == [expected] * len(FORMS)
    placeholder, soft = processor.tokenizer.convert_tokens_to_ids([BEGIN, PICTURE])
    for one in prompts:
        assert one.pictures.token_ids.count(placeholder) == 1
        assert soft not in one.pictures.token_ids
    references = {name: one.prompt.reference for name, one in zip(FORMS, prompts, strict=True)}
    assert references == {"TRL": None, "TRL without parts": None, "ms-swift": "red", "OpenAI": "red", "pairs": "red"}


def test_pictures_inside_of_rows_are_read_there_when_they_are_asked_about(pictures, seeing_folder):  # noqa: F811
    folder = pictures("a.png")
    data = (folder / "a.png").read_bytes()
    row = {**FORMS["TRL"], "images": [f"data:image/png;base64,{base64.b64encode(data).decode()}"]}
    (prompt,) = read(folder, [row], seeing_folder)
    assert prompt.prompt.row["images"] == [f"sha256:{hashlib.sha256(data).hexdigest()}"], (
        "as rewards and memory have it"
    )
    (address,) = prompt.pictures.seen(prompt.token_ids).pictures
    assert base64.b64decode(address.partition(",")[2]) == data


def test_unusable_pictures_are_named_by_row(pictures, seeing_folder, tmp_path):  # noqa: F811
    folder = pictures("a.png")
    (folder / "torn.png").write_bytes((folder / "a.png").read_bytes()[:-40])
    rows = [FORMS["TRL"], *({**FORMS["TRL"], "images": [name]} for name in ("torn.png", "../no.png", "none.png"))]
    with pytest.raises(DataError, match=r"3 of 4 rows are no prompts:(?s:.)*jsonl:2 .*torn(?s:.)*jsonl:3 .*leads out"):
        read(folder, rows, seeing_folder)


def test_prompts_are_shown_with_their_pictures(prompt, seeing_folder):  # noqa: F811
    ((shown,),) = (row.documents for row in look_at_prompts([prompt], seeing_folder, 1).rows)
    (picture,) = shown.pictures
    assert (picture.path, picture.width, picture.height) == ("a.png", *prompt.pictures.images()[0].size)
    assert picture.thumbnail.startswith("data:image/jpeg;base64,")
    assert 0 < picture.num_tokens < shown.num_tokens == len(prompt.token_ids)


def test_more_pictures_than_a_server_takes_are_named(prompt):
    check_pictures([prompt], 1)
    with pytest.raises(DataError, match=r"jsonl:1;.*max_images"):
        check_pictures([prompt], 0)


@pytest.mark.parametrize("is_read_alike", [True, False])
def test_an_engine_is_asked_with_placeholders_and_must_read_the_trainers_tokens(prompt, tmp_path, is_read_alike):
    """The engine is that of another stage on this machine, in a folder whose name is longer than a socket's may be."""
    asked = {}

    class Handler(BaseHTTPRequestHandler):
        """Engine that answers as vLLM's `/inference/v1/generate`."""

        def do_POST(self):
            asked[self.path] = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            content = [{"token": "r", "logprob": -0.25}, {"token": "ed", "logprob": -0.5}]
            choice = {"index": 0, "text": "red", "finish_reason": "stop", "token_ids": [7, 8], "logprobs": {}}
            choice["logprobs"]["content"] = content
            read = prompt.token_ids if is_read_alike else prompt.pictures.token_ids
            body = json.dumps({"choices": [choice], "prompt_token_ids": read, "usage": {"completion_tokens": 2}})
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body.encode())

        def log_message(self, *_):
            pass

    found = []
    runtime = tmp_path / ("r" * 120)
    runtime.mkdir()
    with reached_engine(Vllm(), runtime) as reached:
        assert reached is None, "as on another machine"
    with serving_at(runtime, Handler), reached_engine(Vllm(), runtime) as reached:
        request = {"model": "m", "prompt": prompt.token_ids, "n": 1, "seed": 3, "stop": None, "logprobs": 0}
        requests = [(5, {**request, "pictures": prompt.pictures})]

        def ask():
            ask_all(Client("http://proxy", "key", "m"), requests, 1, lambda *one: found.append(one), server=reached)

        if not is_read_alike:
            with pytest.raises(ServerError, match=r"1 picture as \d+ tokens, and training read it as"):
                ask()
            return
        ask()
    ((path, body),) = asked.items()
    assert (path, body["token_ids"]) == ("/inference/v1/generate", prompt.pictures.token_ids)
    assert body["sampling_params"] == {"n": 1, "seed": 3, "logprobs": 0}
    (part,) = body["content_parts"]
    sent = base64.b64decode(part["url"].partition(",")[2])
    assert hashlib.sha256(sent).hexdigest() == prompt.pictures.media[0].sha256
    ((job, _, answer),) = found
    assert (job, answer.choices[0].text, answer.choices[0].sampled("it")) == (5, "red", ([7, 8], [-0.25, -0.5]))


@contextmanager
def serving_at(runtime, handler):
    """Serve requests at the socket `engine.sock` in a folder."""
    folder = os.open(runtime, os.O_PATH | os.O_DIRECTORY)
    with ThreadingUnixStreamServer(f"/proc/self/fd/{folder}/engine.sock", handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield
        finally:
            server.shutdown()
            thread.join()
            os.close(folder)


def test_kept_rows_take_their_pictures_along(prompt, tmp_path):
    document = prompt.prompt.document
    red, blue = (
        Sample(prompt=0, sample=0, seed=0, text=text, num_tokens=1, truncated=False) for text in ("red", "blue")
    )
    rows = (selection._row(document, red), selection._pair(document, red, blue))
    written = _with_pictures(ScoredPrompt(prompt, [], selection.Choice(rows, ("kept",))), tmp_path)
    media = MediaFolder.of(tmp_path, ())
    kept = RowReader("auto", "examples", media=media).read(json.loads(json.dumps(written[0])))
    pair = RowReader("auto", "pairs", media=media).read(json.loads(json.dumps(written[1])))
    assert [one.sha256 for row in (kept, pair) for document in row for one in document.media] == [
        prompt.pictures.media[0].sha256
    ] * 3
    (prompt.pictures.folder.root / "a.png").write_bytes(b"another")
    with pytest.raises(DataError, match="has changed since its row was read"):
        _with_pictures(ScoredPrompt(prompt, [], selection.Choice(rows, ("kept",))), tmp_path / "again")


def test_a_completion_ends_before_a_token_that_stands_for_a_picture():
    said = Choice(text="red", token_ids=[7, 8, 5], logprobs=TokenLogProbs(token_logprobs=[-1.0, -2.0, -3.0]))
    assert _completion(said, {5}).token_ids == [7, 8]
    assert _completion(said, {5}).log_probabilities == [-1.0, -2.0]
    assert _completion(said, ()).token_ids == [7, 8, 5]
