"""A real vLLM reads rows with videos and sounds as training recorded them, and those of requests as training does."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import transformers

from stages.core.errors import ServerError
from stages.harnesses.lm_eval.tasks import select_tasks
from stages.kinds.serve.chat import read_medium
from stages.models.recorded import read_tool_prompts
from stages.serving.agreement import compare_with_records
from stages.serving.config import BenchmarkConfig, ServeExecution, ServingConfig
from stages.serving.registry import new_launch_spec
from stages.serving.served_models import ServedModel
from stages.serving.server import Server, started_server
from tests.serving import SERVING
from tests.unit.stages.kinds.evaluate.lm_eval.test_pictures import TASK, asked
from tests.unit.stages.kinds.train import test_sounds, test_videos
from tests.unit.stages.kinds.train.media_training import losses_of, write_rows

pytestmark = pytest.mark.nightly


@contextmanager
def served(folder: Path) -> Iterator[Server]:
    """Serve a trained model whose recorded documents and prompts are the same in vLLM."""
    model = folder / "work" / "model"
    assert any(len(prompt.pictures) == 2 for prompt in read_tool_prompts(model.parent))
    spec = new_launch_spec(model, "sft", ServingConfig(**{**SERVING, "max_model_len": 320}))
    with started_server(spec, ServeExecution(), folder / "log", folder / "runtime") as server:
        server.wait_until_ready(500)
        server.check()
        warnings: list[str] = []
        found = compare_with_records(server.client, spec, ["sft"], 320, warnings.append, address=server.address)["sft"]
        assert not warnings
        assert found.num_documents >= 3
        assert found.from_training.most <= 1e-4
        assert found.from_training.same_greedy == 1
        assert found.differing_picture_prompts == 0
        benchmark = BenchmarkConfig(concurrencies=(2,), requests_per_concurrency=2, input_tokens=16, output_tokens=4)
        (load,) = server.engine.generate_load(server.client, spec, benchmark, folder)
        assert (load.num_failed, load.num_output_tokens) == (0, 16)
        yield server


def answer(server: Server, part: dict[str, Any]) -> Any:
    asked = [{"role": "user", "content": [part, {"type": "text", "text": "what?"}]}]
    body = {"model": "sft", "messages": asked, "max_tokens": 1, "return_token_ids": True}
    return server.client.answer("/v1/chat/completions", dict[str, Any], body)


def check_evaluated(server: Server, folder: Path, columns: str, rows: list[dict[str, Any]]) -> None:
    """Evaluate a task with media by a server: it makes the tokens of every question that training would make."""
    from stages.harnesses.lm_eval.scoring import LmEvalModel, evaluate_tasks, load_tasks

    (folder / "colors.yaml").write_text(TASK.replace("doc_to_image: [images]", columns))
    evaluation = asked(folder, [{"answer": "a", **row} for row in rows], media_kinds=server.spec.limits.kinds)
    loaded = load_tasks(select_tasks(evaluation.tasks, evaluation.task_folder), evaluation)
    model = LmEvalModel(ServedModel(server.client, server.spec.model, 320, False), evaluation)
    samples = evaluate_tasks(model, loaded, evaluation, folder / "answers", lambda *_: None)["samples"]["colors"]
    assert model.num_asked_otherwise == 0
    assert [len(one["media"]) for one in samples] == [1, 2]


@pytest.mark.parametrize(
    ("family", "processor", "of_videos"),
    [("qwen3_vl", transformers.Qwen3VLProcessor, "Qwen3VL")],
)
def test_rows_with_videos_are_served_as_they_were_learned(tmp_path, family, processor, of_videos):
    inputs = test_videos.make_inputs(tmp_path, family, processor, of_videos)
    write_rows(inputs["rows"] / "data", test_videos.ASKED, "completion")
    losses_of(tmp_path, inputs, global_batch_size=4, media=test_videos.SAMPLING)
    with served(tmp_path) as server:
        limits = [server.spec.limits]
        for name in ("b.avi", "c.webm"):
            assert answer(server, read_medium("video", inputs["rows"] / "data" / name, limits))["choices"]
        rows = [{"question": "<video>?", "films": ["b.avi"]}, {"question": "?", "films": ["c.webm", "a.mp4"]}]
        check_evaluated(server, inputs["rows"] / "data", "metadata: {version: 1, doc_to_video: films}", rows)
        for address in ("http://127.0.0.1/a.mp4", "file:///etc/hostname", "data:video/jpeg;base64,AA,AA"):
            with pytest.raises(ServerError, match="answered 400"):
                answer(server, {"type": "video_url", "video_url": {"url": address}})


def test_rows_with_sounds_are_served_as_they_were_learned(tmp_path):
    inputs = test_sounds.make_inputs(tmp_path, seconds=30)  # vLLM's Qwen2-Audio takes no others
    write_rows(inputs["rows"] / "data", test_sounds.ASKED, "completion")
    losses_of(tmp_path, inputs, global_batch_size=4)
    with served(tmp_path) as server:
        processor = transformers.AutoProcessor.from_pretrained(server.spec.model)
        for name, content in test_sounds.FILES.items():
            part = read_medium("audio", inputs["rows"] / "data" / name, [server.spec.limits])
            shown = f"{test_sounds.BEGIN}{test_sounds.SOUND}{test_sounds.END}what?"
            text = f"<|im_start|>user\n{shown}<|im_end|>\n<|im_start|>assistant\n"
            heard = processor(text=[text], audio=[test_sounds.heard(content)], sampling_rate=16000)
            assert answer(server, part)["prompt_token_ids"] == heard["input_ids"][0]
        rows = [{"question": "<audio>?", "sounds": ["b.flac"]}, {"question": "?", "sounds": ["c.ogg", "d.mp3"]}]
        check_evaluated(server, inputs["rows"] / "data", "doc_to_audio: [sounds]", rows)
        for address in ("http://127.0.0.1/a.wav", "file:///etc/hostname"):
            with pytest.raises(ServerError, match="answered 400"):
                answer(server, {"type": "audio_url", "audio_url": {"url": address}})
