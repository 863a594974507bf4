"""A real vLLM reads rows with videos as training recorded them, and decodes videos of requests as training does."""

from typing import Any

import pytest
import transformers

from stages.core.errors import ServerError
from stages.kinds.serve.chat import read_medium
from stages.models.recorded import read_tool_prompts
from stages.serving.agreement import compare_with_records
from stages.serving.config import ServeExecution, ServingConfig
from stages.serving.registry import new_launch_spec
from stages.serving.server import started_server
from tests.serving import SERVING
from tests.unit.stages.kinds.train import test_videos as training

pytestmark = pytest.mark.nightly


def test_rows_with_videos_are_served_as_they_were_learned(tmp_path):
    inputs = training.make_inputs(tmp_path, "qwen3_vl", transformers.Qwen3VLProcessor, "Qwen3VL")
    training.write_rows(inputs["rows"] / "data", "completion")
    training.losses_of(tmp_path, inputs, "sft", global_batch_size=4)
    model = tmp_path / "work" / "model"
    assert any(len(prompt.pictures) == 2 for prompt in read_tool_prompts(model.parent))
    spec = new_launch_spec(model, "sft", ServingConfig(**{**SERVING, "max_model_len": 512}))
    with started_server(spec, ServeExecution(), tmp_path / "log", tmp_path / "runtime") as server:
        server.wait_until_ready(500)
        server.check()
        warnings: list[str] = []
        found = compare_with_records(server.client, spec, ["sft"], 512, warnings.append, address=server.address)["sft"]
        assert not warnings
        assert found.num_documents == 4
        assert found.from_training.most <= 1e-3
        assert found.differing_picture_prompts == 0

        def answer(part: dict[str, Any]) -> Any:
            asked = [{"role": "user", "content": [part, {"type": "text", "text": "what?"}]}]
            body = {"model": "sft", "messages": asked, "max_tokens": 1}
            return server.client.answer("/v1/chat/completions", dict[str, Any], body)

        assert answer(read_medium("video", inputs["rows"] / "data" / "b.avi"))["choices"]
        for address in ("http://127.0.0.1/a.mp4", "file:///etc/hostname", "data:video/jpeg;base64,AA,AA"):
            with pytest.raises(ServerError, match="answered 400"):
                answer({"type": "video_url", "video_url": {"url": address}})
