"""LMDeploy's command contains our settings, LMDeploy's own parser accepts it, and errors are found in its log.

Expectations come from LMDeploy's source: none of its servers was run. Its parser is asked where the package is
installed: LIFECYCLE_LMDEPLOY names its interpreter.
"""

import json
import shutil
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any, ClassVar

import pytest

from stages.core.errors import ModelError, RecipeError, ResourceError, ServerError
from stages.models.recorded import RECORD
from stages.serving.agreement import compare_with_records
from stages.serving.backend import EngineAddress
from stages.serving.client import Client, check_server
from stages.serving.config import BenchmarkConfig, ServingConfig
from stages.serving.engine import LaunchSpec, parsed
from stages.serving.packaged import CHECK, LMDEPLOY, PROGRAM, PackagedProgram
from tests.http_server import serving

ADDRESS = EngineAddress(port=4321)
ENGINE = LMDEPLOY
INSTALLED = PackagedProgram(ENGINE, Path("/env/bin/python"), "0.18.0")
EVERYTHING: dict[str, Any] = {
    "max_model_len": 512,
    "max_num_seqs": 7,
    "tensor_parallel_size": 2,
    "dtype": "float16",
    "enforce_eager": True,
    "trust_remote_code": True,
    "arguments": {"quant-policy": 8, "enable-prefix-caching": True, "model-format": "awq"},
}
VALUES = {"backend": "pytorch", "model-format": "awq", "communicator": "nccl", "speculative-algorithm": "deepseek_mtp"}
FLAGS = ("enable-prefix-caching", "enable-microbatch")
DIED = """2026-11-24 10:00:00,123 - lmdeploy - WARNING - archs.py:33 - Fallback to pytorch engine
Traceback (most recent call last):
  File "packaged_program.py", line 21, in main
torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 20.00 GiB.
"""


@pytest.fixture
def spec(tmp_path: Path):
    def made(config: dict[str, Any] | None = None, **fields: Any) -> LaunchSpec:
        stored = {"dtype": "bfloat16", "max_position_embeddings": 4096, "vocab_size": 8}
        (tmp_path / "config.json").write_text(json.dumps(stored if config is None else config))
        chosen = ServingConfig.model_validate({"engine": "lmdeploy", **fields})
        return LaunchSpec(model=tmp_path, served_name="m", serving=chosen, engine="lmdeploy", engine_version="0.18.0")

    return made


def option(command: list[str], name: str) -> str:
    return command[command.index(name) + 1]


def test_everything_the_recipe_says_reaches_the_command(spec, tmp_path: Path) -> None:
    made = INSTALLED.server_command(spec(**EVERYTHING), ADDRESS)

    assert made[:2] == ["/env/bin/python", "-P"] and made[2].endswith("serving/packaged_program.py")
    assert made[3:5] == ["lmdeploy", str(tmp_path)]
    given = {"--model-name": "m", "--server-name": "127.0.0.1", "--server-port": "4321", "--dtype": "float16"}
    given |= {"--tp": "2", "--session-len": "512", "--max-batch-size": "7", "--logprobs-mode": "raw_logprobs"}
    assert {name: option(made, name) for name in given} == given
    assert {"--trust-remote-code", "--eager-mode", "--disable-fastapi-docs"} <= set(made)
    assert {"--quant-policy=8", "--enable-prefix-caching", "--model-format=awq"} <= set(made)
    environment = INSTALLED.server_environment(spec(), "sk-secret")
    assert environment["LMDEPLOY_SERVER_KEY"] == "sk-secret" and "sk-secret" not in " ".join(made)


def test_what_the_recipe_leaves_out_is_the_models(spec) -> None:
    made = INSTALLED.server_command(spec(), ADDRESS)
    in_float32 = INSTALLED.server_command(spec({"dtype": "float32", "max_position_embeddings": 64}), ADDRESS)

    assert not {"--trust-remote-code", "--max-batch-size", "--eager-mode"} & set(made)
    assert (option(made, "--dtype"), option(in_float32, "--dtype")) == ("auto", "bfloat16")
    assert (option(made, "--session-len"), option(in_float32, "--session-len")) == ("4096", "64")
    with pytest.raises(ModelError, match=r"no max_position_embeddings; say .*`serving.max_model_len`"):
        INSTALLED.server_command(spec({}), ADDRESS)


@pytest.mark.parametrize("name", ["api-keys", "proxy-url", "speculative-draft-model", "allow-terminate-by-client"])
def test_options_that_are_not_listed_are_refused(name: str) -> None:
    assert ENGINE.argument_problems({name: "x"}, at_once=True) == [*ENGINE.refusals({name: "x"})]
    with pytest.raises(RecipeError, match="no option that is passed on to LMDeploy"):
        ENGINE.written({name: "x"})


def test_its_own_parser_takes_the_command(spec) -> None:
    try:
        program = ENGINE.find_program()
    except ResourceError as error:
        pytest.skip(str(error))
    options = INSTALLED.server_command(spec(**EVERYTHING), ADDRESS)[5:]
    each = {name: [f"--{name}"] if name in FLAGS else [f"--{name}={VALUES.get(name, 1)}"] for name in ENGINE.passed}
    whole = {"everything": options, **each, "quant-policy": ["--quant-policy=int8"], "unknown": ["--tpp=2"]}

    found = parsed((program.command, "-P", PROGRAM, ENGINE.name, CHECK), json.dumps(whole))

    assert found == ["unknown: unrecognized arguments: --tpp=2"]


def test_the_cause_comes_with_what_to_change() -> None:
    found = ENGINE.root_cause(DIED) or ""

    assert found.startswith("torch.OutOfMemoryError: CUDA out of memory.")
    assert "lower serving.arguments.cache-max-entry-count" in found
    usage = "packaged_program.py api_server: error: argument --tp: invalid int value: 'x'"
    assert ENGINE.root_cause(usage) == "argument --tp: invalid int value: 'x'"
    quantized = "ValueError: Only compressed-tensors `pack-quantized` format is supported."
    assert "serve this model with `engine: vllm`" in (ENGINE.root_cause(quantized) or "")
    assert ENGINE.root_cause("2026-11-24 10:00:00,123 - lmdeploy - WARNING - archs.py:33 - Fallback") is None


class Handler(BaseHTTPRequestHandler):
    """HTTP server with the answers of LMDeploy 0.18.0, whose `/v1/completions` must not be used."""

    asked: ClassVar[list[dict[str, Any]]] = []
    content: ClassVar[list[dict[str, Any]]] = [{"token": "a", "logprob": -0.5, "top_logprobs": []}]

    def do_GET(self) -> None:
        card = {"id": "m", "object": "model", "root": "m", "owned_by": "lmdeploy"}
        self.answer(json.dumps({"data": [card]} if self.path == "/v1/models" else {"status": "healthy"}))

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.asked.append({"path": self.path, **body})
        if body.get("stream"):
            usage = {"completion_tokens": body["max_tokens"]}
            events = [{"choices": [{"delta": {"content": "a"}}], "usage": None}, {"choices": [], "usage": usage}]
            self.answer("".join(f"data: {json.dumps(event)}\n\n" for event in events) + "data: [DONE]\n\n")
            return
        self.answer(json.dumps({"choices": [{"message": {}, "logprobs": {"content": self.content}}]}))

    def answer(self, text: str) -> None:
        self.send_response(200)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, *_: object) -> None:
        pass


def test_a_running_server_is_asked_by_chats_of_token_ids(spec, tmp_path: Path, monkeypatch) -> None:
    Handler.asked.clear()
    load = BenchmarkConfig(concurrencies=(2,), requests_per_concurrency=2, input_tokens=3, output_tokens=5)
    with serving(Handler) as url:
        client = Client(url, "key", "m")
        check_server(client, ENGINE.smoke_log_probabilities)
        (result,) = ENGINE.generate_load(client, spec(), load, tmp_path)
        monkeypatch.setattr(Handler, "content", [])
        with pytest.raises(ServerError, match="gives no log-probabilities of what it generated"):
            check_server(client, ENGINE.smoke_log_probabilities)

    assert {(one["path"], one["model"], len(one["messages"])) for one in Handler.asked} == {
        ("/v1/chat/completions", "m", 0)
    }
    assert {len(one["input_ids"]) for one in Handler.asked if one.get("stream")} == {3}
    assert (result.num_requests, result.num_failed, result.num_output_tokens) == (4, 0, 20)
    assert ENGINE.context_tokens(client, spec()) == 4096


def test_that_it_is_not_compared_with_a_record_is_said(spec, tmp_path: Path) -> None:
    model = spec().model
    shutil.copytree(model, tmp_path / "model")
    (tmp_path / RECORD).touch()
    warnings: list[str] = []
    with serving(Handler) as url:
        at = spec().model_copy(update={"model": tmp_path / "model"})
        assert compare_with_records(Client(url, "key", "m"), at, ["m"], 64, warnings.append) == {}

    assert warnings and "m: what is served was not compared with what was trained, since LMDeploy" in warnings[0]
