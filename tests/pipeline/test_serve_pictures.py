"""A real vLLM reads documents with pictures as the trainer's record has them, for a model and for its adapter."""

import base64
import io
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers
from PIL import Image

from stages.core.errors import ServerError
from stages.data.media.images import PictureError, as_data_address, decode_picture
from stages.hubs.builtin import qwen3_vl
from stages.kinds.serve.chat import Conversation, chat, read_medium
from stages.models.processor import MediaProcessor
from stages.models.recorded import Predicted, RecordedDocument, ToolPrompt, write_record
from stages.serving.agreement import compare_with_records
from stages.serving.config import BenchmarkConfig, ServeExecution, ServingConfig
from stages.serving.registry import new_launch_spec
from stages.serving.server import Server, started_server
from tests.serving import SERVING
from tests.unit.stages.data.media.odd_pictures import odd_pictures
from tests.zoo.pictures import picture

pytestmark = pytest.mark.nightly
LARGEST_DIFFERENCE = 1e-4
"""Largest difference of log-probabilities in nats per token, in fp32."""
SIZES = ([(32, 16)], [(64, 40), (48, 90)], [])
QUESTION = "<|im_start|>user\n{}What number is drawn?<|im_end|>\n<|im_start|>assistant\n{}<|im_end|>\n"
SHOWN = "<|vision_start|><|image_pad|><|vision_end|>"


@dataclass
class Model:
    """Tiny Qwen3-VL, its processor, and what Transformers makes of documents with pictures."""

    folder: Path
    processor: MediaProcessor
    model: Any

    def document(self, images: list[Image.Image], answer: str) -> RecordedDocument:
        """Return the record of a document, as training would leave it."""
        text = QUESTION.format(SHOWN * len(images), answer)
        given = self.processor._processor(text=[text], images=[images] if images else None, add_special_tokens=False)
        (ids,) = given["input_ids"]
        num_learned = len(self.processor._tokens(f"{answer}<|im_end|>\n"))
        log_probabilities = self.log_probabilities(ids, images)
        targets = [*ids[1:], -1]
        targets[: -num_learned - 1] = [-1] * (len(ids) - num_learned - 1)
        learned = [place for place, target in enumerate(targets) if target >= 0]
        predicted = Predicted(
            [log_probabilities[place, ids[place + 1]].item() for place in learned],
            [int(log_probabilities[place].argmax()) for place in learned],
        )
        pictures = [as_data_address(png(image)) for image in images]
        return RecordedDocument(ids, targets, 0.0, pictures=pictures).recording(predicted)

    def prompt(self, images: list[Image.Image]) -> ToolPrompt:
        """Return the record of a prompt with pictures, as training would leave it."""
        text = QUESTION.format(SHOWN * len(images), "").removesuffix("<|im_end|>\n")
        (ids,) = self.processor._processor(text=[text], images=[images], add_special_tokens=False)["input_ids"]
        parts = [*({"type": "image"} for _ in images), {"type": "text", "text": "What number is drawn?"}]
        pictures = [as_data_address(png(image)) for image in images]
        asked = [{"role": "user", "content": parts}]
        return ToolPrompt(messages=asked, tools=[], variables={}, token_ids=ids, pictures=pictures)

    @torch.no_grad()
    def log_probabilities(self, ids: list[int], images: list[Image.Image]) -> torch.Tensor:
        """Return ln p of every token at each place, [tokens, vocabulary]."""
        inputs = self.processor.inputs(ids, images)
        logits: torch.Tensor = self.model(**inputs).logits[0]
        return logits.log_softmax(-1)


def png(image: Image.Image) -> bytes:
    out = io.BytesIO()
    image.save(out, "PNG")
    return out.getvalue()


def load(folder: Path) -> Any:
    return transformers.AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Provide artifacts: a model, and an adapter of its language part, each with the record of three documents."""
    root = tmp_path_factory.mktemp("seeing")
    folder = root / "sft" / "model"
    folder.mkdir(parents=True)
    qwen3_vl.make(folder)
    adapted = peft.get_peft_model(
        load(folder),
        peft.LoraConfig(r=4, lora_alpha=8, target_modules=r".*language_model.*\.(q|k|v|o|gate|up|down)_proj"),
    )
    torch.manual_seed(0)
    for name, parameter in adapted.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.3)
    adapted.save_pretrained(root / "dpo" / "adapter")
    for name, model in (("sft", load(folder)), ("dpo", adapted.eval())):
        seen = Model(folder, MediaProcessor(folder), model)
        documents = [
            seen.document([picture(size, number) for size in sizes], f"{number}{number}")
            for number, sizes in enumerate(SIZES)
        ]
        write_record(root / name, documents, "float32", [seen.prompt([picture(SIZES[0][0])])])
    return root


@pytest.fixture(scope="module")
def server(root: Path) -> Iterator[Server]:
    spec = new_launch_spec(
        root / "sft" / "model",
        "sft",
        ServingConfig(**SERVING, max_images=2),
        adapters={"dpo": root / "dpo" / "adapter"},
    )
    with started_server(spec, ServeExecution(), root / "log", root / "runtime") as server:
        server.wait_until_ready(500)
        server.check()
        yield server


def test_documents_with_pictures_are_read_as_in_training(server: Server):
    """Log-probabilities of the model and of its adapter are those of training, and no document is left out."""
    warnings: list[str] = []
    found = compare_with_records(
        server.client, server.spec, ["sft", "dpo"], 256, warnings.append, address=server.address
    )
    assert {name: agreement.num_documents for name, agreement in found.items()} == {"sft": 3, "dpo": 3}
    assert max(agreement.from_training.most for agreement in found.values()) <= LARGEST_DIFFERENCE
    assert all(agreement.from_training.same_greedy == 1 for agreement in found.values())
    assert {agreement.differing_picture_prompts for agreement in found.values()} == {0}
    assert not warnings

    without = compare_with_records(server.client, server.spec, ["sft"], 256, warnings.append)
    assert without["sft"].num_documents == 1


def test_pictures_of_another_size_or_number_are_not_compared(server: Server, tmp_path: Path):
    seen = Model(server.spec.model, MediaProcessor(server.spec.model), load(server.spec.model))
    wide = seen.document([picture((64, 40))], "1")
    (tmp_path / "model").symlink_to(server.spec.model)
    spec = server.spec.model_copy(update={"model": tmp_path / "model", "adapters": {}})
    narrow = as_data_address(png(picture((32, 16))))
    documents = {"another size": [narrow], "three": [*wide.pictures] * 3}
    for name, pictures in documents.items():
        write_record(tmp_path, [replace(wide, pictures=pictures)], "float32")
        warnings: list[str] = []
        compared = compare_with_records(server.client, spec, ["sft"], 256, warnings.append, address=server.address)
        assert not compared and "cannot be compared" in warnings[0], name


def test_a_prompt_that_is_read_otherwise_is_counted(server: Server, tmp_path: Path):
    seen = Model(server.spec.model, MediaProcessor(server.spec.model), load(server.spec.model))
    asked = seen.prompt([picture((32, 16))])
    other = asked.model_copy(update={"pictures": [as_data_address(png(picture((64, 40))))]})
    (tmp_path / "model").symlink_to(server.spec.model)
    spec = server.spec.model_copy(update={"model": tmp_path / "model", "adapters": {}})
    write_record(tmp_path, [seen.document([], "1")], "float32", [asked, other])
    warnings: list[str] = []
    found = compare_with_records(server.client, spec, ["sft"], 256, warnings.append, address=server.address)["sft"]
    assert found.metrics()["differing_picture_prompts"] == 1
    assert "differing_tool_prompts" not in found.metrics()
    assert "renders a prompt with pictures to other tokens" in warnings[0]


def test_odd_pictures_are_seen_as_decoded_here(server: Server):
    """vLLM's likeliest token after each of the odd pictures is as likely as after what the trainer decodes of it."""
    seen = Model(server.spec.model, MediaProcessor(server.spec.model), load(server.spec.model))
    tokenizer = seen.processor._processor.tokenizer
    refused = set()
    for name, data in odd_pictures().items():
        address = f"data:image/png;base64,{base64.b64encode(data).decode()}"
        parts = [{"type": "image_url", "image_url": {"url": address}}, {"type": "text", "text": "?"}]
        asked = {"model": "sft", "messages": [{"role": "user", "content": parts}], "max_tokens": 1, "temperature": 0}
        asked |= {"logprobs": True, "top_logprobs": 1, "return_token_ids": True}
        try:
            image = decode_picture(data)
        except PictureError:
            with pytest.raises(ServerError, match="answered 400"):
                server.client.answer("/v1/chat/completions", dict[str, Any], asked)
            refused.add(name)
            continue
        answer = server.client.answer("/v1/chat/completions", dict[str, Any], asked)
        text = f"<|im_start|>user\n{SHOWN}?<|im_end|>\n<|im_start|>assistant\n"
        (ids,) = seen.processor._processor(text=[text], images=[[image]], add_special_tokens=False)["input_ids"]
        assert answer["prompt_token_ids"] == ids, name
        (token,) = answer["choices"][0]["token_ids"]
        expected = seen.log_probabilities(ids, [image])[-1]
        given = answer["choices"][0]["logprobs"]["content"][0]["logprob"]
        assert given == pytest.approx(expected[token].item(), abs=LARGEST_DIFFERENCE), name
        assert token == int(expected.argmax()), (name, tokenizer.decode([token]))
    assert {"svg", "animated", "empty"} < refused and len(refused) <= 10


def test_a_chat_shows_pictures_of_files(server: Server, tmp_path: Path, monkeypatch, capsys):
    (tmp_path / "a.png").write_bytes(png(picture((32, 16))))
    monkeypatch.setattr(sys, "stdin", io.StringIO("What number is drawn?\nand?\n"))
    conversation = Conversation(server.client, "sft", {"max_tokens": 2, "temperature": 0})
    conversation.media = [read_medium("image", tmp_path / "a.png", [server.spec.limits])]
    chat([conversation])
    assert not capsys.readouterr().err
    assert [type(message["content"]) for message in conversation.messages] == [list, str, str, str]


def test_the_load_has_pictures(server: Server, tmp_path: Path):
    benchmark = BenchmarkConfig(concurrencies=(1, 2), requests_per_concurrency=2, input_tokens=16, output_tokens=4)
    loads = server.engine.generate_load(server.client, server.spec, benchmark, tmp_path)
    assert [(load.num_requests, load.num_failed, load.num_output_tokens) for load in loads] == [(2, 0, 8), (4, 0, 16)]
