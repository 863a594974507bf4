"""Sampling servers that the user runs must accept new weights; training waits while one of them is down.

The server here answers what vLLM 0.32 answered; tests/pipeline/test_grpo.py asks a real one.
"""

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pydantic import ValidationError
from safetensors.numpy import save_file

from stages.adapters.config import AdapterConfig
from stages.adapters.headers import CONFIG_FILE, PREFIX, WEIGHTS_FILE
from stages.core.contract import StageInput
from stages.core.errors import RecipeError, ServerError, TransientError
from stages.kinds.train.check import check
from stages.kinds.train.config import TrainConfig
from stages.kinds.train.media import check_media
from stages.kinds.train.rollouts import many_servers, server
from stages.kinds.train.rollouts.many_servers import ManyServers
from stages.kinds.train.rollouts.server import (
    ExternalServer,
    PolicyServer,
    RolloutServer,
    external_server_problems,
)
from stages.models.facts import ModelFacts
from tests.http_server import serving
from tests.train_stage import make_artifacts, make_config

KEY = "a-key-that-is-secret"
MODEL = "learner"
OPTIONS: dict[str, Any] = {
    "num_generations": 4,
    "max_completion_length": 6,
    "rewards": {"like": {"type": "regex", "pattern": "e"}},
}
CONFIGURED = {
    "dtype": "torch.float32",
    "max_model_len": 64,
    "generation_config": "vllm",
    "logprobs_mode": "processed_logprobs",
}


@dataclass
class Served:
    """State of a fake sampling server: its model, the weights that it loaded, and the requests that it will fail.

    configured: its description of its model. lora: that of its room for adapters. loaded: folders of weights. adapters:
    loaded ones, by name. num_failing: further requests that fail, by kind (`completions`, `health`, …). asked: seeds of
    the completions that it gave.
    """

    url: str = ""
    configured: dict[str, Any] = field(default_factory=lambda: dict(CONFIGURED))
    lora: dict[str, Any] | None = None
    has_routes: bool = True
    swaps_adapters: bool = True
    adapters: dict[str, str] = field(default_factory=dict)
    takes_pictures: bool = True
    sees_files: bool = True
    loaded: list[str] = field(default_factory=list)
    num_failing: dict[str, int] = field(default_factory=dict)
    asked: list[Any] = field(default_factory=list)

    def answer(self, path: str, asked: Any, key: str | None) -> tuple[int, Any]:
        name = path.partition("?")[0].rpartition("/")[2]
        if path.startswith("/v1/") and key != f"Bearer {KEY}":
            return 401, {"error": f"not with {key}"}
        if self.num_failing.get(name, 0):
            self.num_failing[name] -= 1
            return 400 if name == "completions" else 503, {"error": "broken"}
        if name == "generate":
            assert asked == {}, "it is asked for nothing"
            return (400, {"error": "no tokens"}) if self.takes_pictures else (403, {"error": "disabled"})
        if name == "models":
            return 200, {"data": [{"id": one} for one in (MODEL, *self.adapters)]}
        if name.endswith("_lora_adapter"):
            return self.swap(name, asked["lora_name"], asked.get("lora_path"))
        if name == "completions":
            if asked["model"] not in (MODEL, *self.adapters):
                return 404, {"error": f"no model {asked['model']}"}
            self.asked.append(asked.get("seed"))
            return 200, {"choices": [{"text": "x"}]}
        if name == "health":
            return 200, {}
        if not self.has_routes:
            return 404, {"detail": "Not Found"}
        if name == "server_info":
            said = {"model_config": self.configured, "device_config": {"device": "cuda"}, "lora_config": self.lora}
            return 200, {"vllm_config": said}
        if name == "collective_rpc":
            folder = asked["kwargs"]["weights_path"]
            if not (self.sees_files and list(Path(folder).glob("*.safetensors"))):
                return 500, {"error": f"Cannot find any model weights with {folder}"}
            if asked["kwargs"].get("is_checkpoint_format", True):
                self.loaded.append(Path(folder).name)
        return 200, {}

    def swap(self, what: str, name: str, folder: str | None) -> tuple[int, Any]:
        if not self.swaps_adapters:
            return 404, {"detail": "Not Found"}
        is_known = name in self.adapters
        if not name or is_known == (what == "load_lora_adapter"):
            return 400, {"error": f"{name} {'is loaded already' if is_known else 'is not there'}"}
        if folder is None:
            del self.adapters[name]
        else:
            self.adapters[name] = Path(folder).name
        return 200, {}


@pytest.fixture(scope="module")
def artifacts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return make_artifacts(tmp_path_factory.mktemp("artifacts"))


@pytest.fixture
def served() -> Iterator[Served]:
    with running() as state:
        yield state


@contextmanager
def running() -> Iterator[Served]:
    state, lock = Served(), threading.Lock()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            self.do_POST()

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"] or 0))
            with lock:
                status, content = state.answer(self.path, json.loads(body or "{}"), self.headers["Authorization"])
            answer = json.dumps(content).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(answer)))
            self.end_headers()
            self.wfile.write(answer)

        def log_message(self, *_: object) -> None:
            pass

    with serving(Handler) as state.url:
        yield state


@pytest.fixture(autouse=True)
def key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SAMPLER_KEY", KEY)
    monkeypatch.setattr(server, "POLL_INTERVAL_S", 0.01)


def config_of(url: str, method: str = "grpo", /, **changed: Any) -> TrainConfig:
    """Return a train config whose sampling server is at `url`; `changed` replaces fields of the server's block."""
    server = {"url": f"{url}/v1", "served_model": MODEL, "key_variable": "SAMPLER_KEY", **changed}
    data = {"dataset": "problems", "sequence_length": 64}
    execution = {"ready_timeout_s": 60, "rollout_timeout_s": 60}
    if method == "grpo":
        return make_config("grpo", data=data, grpo={**OPTIONS, "server": server}, execution=execution)
    distill = {"loss_top_k": 8, "lmbda": 0.5, "sampling": {"max_completion_length": 8, "server": server}}
    return make_config(method, data=data, teacher="base", distill=distill, execution=execution)


def found(config: TrainConfig, artifacts: dict[str, Path], folder: Path) -> list[tuple[str, Any]]:
    """Return the problems found before training in a train config, with the config field of each."""
    said = config.model_dump(mode="json")
    stage_input = StageInput(name="x", kind="train", version="0", config=said, inputs=artifacts, cache=folder)
    return list(check(stage_input))


@pytest.mark.parametrize("method", ["grpo", "distill"])
def test_a_server_that_does_all_is_no_problem(
    served: Served, artifacts: dict[str, Path], tmp_path: Path, method: str
) -> None:
    assert found(config_of(served.url, method), artifacts, tmp_path) == []


@pytest.mark.parametrize(
    ("configured", "message"),
    [
        ({"logprobs_mode": "raw_logprobs"}, "its logprobs-mode is raw_logprobs; start it with `--logprobs-mode proc"),
        ({"generation_config": "auto"}, "its generation-config is auto; start it with `--generation-config vllm`"),
        ({"dtype": "torch.bfloat16"}, "computes in bfloat16, where float32 is asked for; start it with `--dtype float"),
        ({"max_model_len": 32}, "takes 32 tokens .* there may be 64; start it with `--max-model-len 64`, or say"),
    ],
)
def test_what_it_was_started_without_is_named(
    served: Served, artifacts: dict[str, Path], tmp_path: Path, configured: dict[str, Any], message: str
) -> None:
    served.configured |= configured
    ((name, problem),) = found(config_of(served.url), artifacts, tmp_path)
    assert name == "grpo.server"
    with pytest.raises(ServerError, match=message):
        raise problem


@pytest.mark.parametrize(
    ("changed", "error", "message"),
    [
        ({"served_model": "other"}, ServerError, "serves learner, not other; name one of these"),
        ({"key_variable": "NOT_SET"}, RecipeError, "no NOT_SET, which `distill.sampling.server.key_variable` names"),
        ({"key_variable": "SAMPLER"}, ServerError, "answered 401"),
        ({"url": "http://127.0.0.1:9/v1"}, TransientError, "does not answer: .*, or correct `distill.sampling.server."),
    ],
)
def test_what_cannot_be_asked_is_named(
    served: Served,
    artifacts: dict[str, Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    changed: dict[str, Any],
    error: type[Exception],
    message: str,
) -> None:
    monkeypatch.setenv("SAMPLER", "another-secret")  # whose name does not say that it is one
    ((name, problem),) = found(config_of(served.url, "distill", **changed), artifacts, tmp_path)
    assert name == "distill.sampling.server"
    assert "secret" not in str(problem)
    with pytest.raises(error, match=message):
        raise problem


def test_a_server_without_the_routes_is_told_how_to_start(
    served: Served, artifacts: dict[str, Path], tmp_path: Path
) -> None:
    served.has_routes = False
    ((_, problem),) = found(config_of(served.url), artifacts, tmp_path)
    assert "start it with `VLLM_SERVER_DEV_MODE=1 vllm serve MODEL --generation-config vllm" in str(problem)


def test_a_server_that_does_not_see_the_folder_is_no_use(
    served: Served, artifacts: dict[str, Path], tmp_path: Path
) -> None:
    (named,) = ExternalServer.all_of(config_of(served.url), ModelFacts(artifacts["base"] / "model"))
    named.check(tmp_path / "seen")
    assert served.loaded == [], "that changed no weights"
    served.sees_files = False
    with pytest.raises(ServerError, match="must have the same one under the same path"):
        named.check(tmp_path / "unseen")


@pytest.fixture
def rollouts(served: Served, artifacts: dict[str, Path]) -> Iterator[tuple[RolloutServer, list[str]]]:
    """Provide our client of a fake sampling server that the recipe names, and the list of its warnings."""
    config, warned = config_of(served.url), []
    (host,) = ExternalServer.all_of(config, ModelFacts(artifacts["base"] / "model"))
    yield RolloutServer(host, config.execution, warned.append), warned


def weights(folder: Path, name: str) -> Path:
    (folder / name).mkdir()
    (folder / name / "model.safetensors").write_bytes(b"")
    return folder / name


def test_a_server_that_was_away_gets_the_same_weights_and_is_asked_again(
    served: Served, rollouts: tuple[RolloutServer, list[str]], tmp_path: Path
) -> None:
    server, warned = rollouts
    server.take(weights(tmp_path, "first"))
    server.take(weights(tmp_path, "second"))
    assert not (tmp_path / "first").exists()
    served.num_failing = {"completions": 1, "health": 3}
    answers: dict[int, Any] = {}
    server.ask(
        [(number, {"prompt": [1]}) for number in range(3)], lambda number, _, answer: answers.update({number: answer})
    )
    assert sorted(answers) == [0, 1, 2]
    assert served.loaded == ["first", "second", "second"]
    (warning,) = warned
    assert "is waited for, and given the same weights again: " in warning
    server.close()
    assert server._host.client.is_healthy(), "it goes on"


def test_a_refused_request_of_a_healthy_server_is_an_error(
    served: Served, rollouts: tuple[RolloutServer, list[str]], tmp_path: Path
) -> None:
    server, warned = rollouts
    server.take(weights(tmp_path, "first"))
    served.num_failing = {"completions": 1}
    with pytest.raises(ServerError, match="broken"):
        server.ask([(0, {"prompt": [1]})], lambda *_: None)
    assert warned == []


def test_a_server_that_does_not_come_back_is_transient(
    served: Served, rollouts: tuple[RolloutServer, list[str]], tmp_path: Path
) -> None:
    server, _ = rollouts
    server.take(weights(tmp_path, "first"))
    served.num_failing = {"completions": 1, "health": 1000}
    server._host = replace(server._host, ready_timeout_s=0.2)
    with pytest.raises(TransientError, match=r"has not answered for 0\.2 s \(execution.ready_timeout_s\); start it ag"):
        server.ask([(0, {"prompt": [1]})], lambda *_: None)


def test_what_a_server_does_not_answer_is_asked_of_another(
    served: Served, artifacts: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two servers share the prompts; one that is away loses none of them, and is checked when it comes back."""
    monkeypatch.setattr(many_servers, "POLL_INTERVAL_S", 0.01)
    with running() as other:
        config, warned = config_of(served.url, other_urls=[f"{other.url}/v1"]), []
        assert found(config, artifacts, tmp_path) == []
        hosts = ExternalServer.all_of(config, ModelFacts(artifacts["base"] / "model"))
        servers = ManyServers(hosts, config.execution, warned.append)

        def ask(num_prompts: int) -> tuple[list[Any], list[Any]]:
            """Return the seeds with which each of the servers was asked, and check that every prompt has an answer."""
            for one in (served, other):
                one.asked.clear()
            answered: list[int] = []
            requests = [(number, {"prompt": [1], "seed": 100 + number}) for number in range(num_prompts)]
            servers.ask(requests, lambda number, *_: answered.append(number))
            assert sorted(answered) == list(range(num_prompts))
            return sorted(served.asked), sorted(other.asked)

        servers.take(weights(tmp_path, "first"))
        assert ask(5) == ([100, 102, 104], [101, 103])
        other.num_failing = {"completions": 1000, "health": 1000}
        assert ask(5) == ([100, 101, 102, 103, 104], [])
        assert f"{other.url}, is left out of this round, and 2 prompts of its 2 asked of the others" in warned.pop()
        servers.take(weights(tmp_path, "second"))
        assert not (tmp_path / "first").exists()
        assert "is left out of the next round: it does not answer" in warned.pop()
        other.num_failing = {}
        other.configured["dtype"] = "torch.bfloat16"  # another server at its address
        servers.take(weights(tmp_path, "third"))
        assert "computes in bfloat16" in warned.pop()
        other.configured["dtype"] = "torch.float32"
        servers.take(weights(tmp_path, "fourth"))
        assert ask(2) == ([100], [101])
        assert (served.loaded, other.loaded) == (["first", "second", "third", "fourth"], ["first", "fourth"])
        served.num_failing = {"completions": 1}
        with pytest.raises(ServerError, match="broken"):
            ask(2)  # a request that a healthy server refuses
        assert warned == []
        served.num_failing = {"completions": 1, "health": 3}
        other.num_failing = {"completions": 2, "health": 1000}
        assert ask(2) == ([100, 101], [])
        assert served.loaded[-2:] == ["fourth", "fourth"], "when it came back, since it may have been started again"
        served.num_failing = {"completions": 1000, "health": 1000}
        servers._hosts = [replace(one, ready_timeout_s=0.3) for one in hosts]
        with pytest.raises(TransientError, match=r"none of the 2 servers .* is left .* it does not answer; start them"):
            ask(2)


ROOM = {"max_lora_rank": 16, "max_loras": 2, "target_modules": ["q_proj", "v_proj"]}


@pytest.mark.parametrize(
    ("room", "message"),
    [
        (
            None,
            r"no adapters; start it with `--enable-lora --max-loras 2 --max-lora-rank 16 --lora-target-modules LAYE",
        ),
        ({**ROOM, "max_lora_rank": 8}, "takes adapters of rank 8 at most; start it with `--max-lora-rank 16`"),
        (
            {**ROOM, "max_loras": 1},
            "it holds 1 adapter, and answered for its base by that; start it with `--max-loras 2",
        ),
        (
            {**ROOM, "target_modules": None},
            "its head may have an adapter, and two questions about a prompt would end it",
        ),
        ({**ROOM, "target_modules": ["lm_head", "q_proj"]}, "its head may have an adapter"),
    ],
)
def test_a_server_without_room_for_an_adapter_is_told_how_to_start(
    served: Served, artifacts: dict[str, Path], room: dict[str, Any] | None, message: str
) -> None:
    served.lora = room
    (problem,) = external_server_problems(adapted(served.url), ModelFacts(artifacts["base"] / "model"))
    with pytest.raises(ServerError, match=message):
        raise problem


def test_a_server_that_loads_no_adapters_while_it_runs_is_told_so(
    served: Served, artifacts: dict[str, Path], tmp_path: Path
) -> None:
    served.lora = ROOM
    assert found(adapted(served.url), artifacts, tmp_path) == []
    served.swaps_adapters = False
    too_high = adapted(served.url).model_copy(update={"adapter": AdapterConfig(rank=1000)})
    (problem,) = external_server_problems(too_high, ModelFacts(artifacts["base"] / "model"))
    assert "vLLM takes adapters of rank 512 at most; lower `adapter.rank`, from 1000" in str(problem)
    ((_, problem),) = found(adapted(served.url), artifacts, tmp_path)
    assert "set VLLM_ALLOW_RUNTIME_LORA_UPDATING=1 where it starts" in str(problem)


def adapted(url: str, **changed: Any) -> TrainConfig:
    return config_of(url, **changed).model_copy(update={"adapter": AdapterConfig(rank=12)})


def write_adapter(folder: Path, name: str, *layers: str) -> Path:
    """Write an adapter in PEFT's format on these layers into a folder of this name."""
    (folder / name).mkdir()
    factors = {f"{PREFIX}layers.0.{layer}.lora_{one}.weight": np.ones((4, 4)) for layer in layers for one in "AB"}
    save_file({key: value.astype("float32") for key, value in factors.items()}, folder / name / WEIGHTS_FILE)
    (folder / name / CONFIG_FILE).write_text(json.dumps({"peft_type": "LORA", "r": 4, "lora_alpha": 4}))
    return folder / name


@pytest.mark.parametrize("num_servers", [1, 2])
def test_a_server_that_would_leave_layers_without_an_adapter_is_no_use(
    served: Served, artifacts: dict[str, Path], tmp_path: Path, num_servers: int
) -> None:
    served.lora = ROOM
    config = adapted(served.url, other_urls=["http://127.0.0.1:9/v1"] * (num_servers - 1))
    servers = servers_of(config, artifacts)
    with pytest.raises(ServerError, match="would leave o_proj without their adapter, and say nothing; start it with"):
        servers.take(write_adapter(tmp_path, "step-0", "q_proj", "v_proj", "o_proj"))
    assert served.adapters == {}


def servers_of(config: TrainConfig, artifacts: dict[str, Path], warn: Any = print) -> PolicyServer:
    """Return the named servers of a config as rank 0 uses them."""
    hosts = ExternalServer.all_of(config, ModelFacts(artifacts["base"] / "model"), "0123456789abcdef")
    return ManyServers(hosts, config.execution, warn) if hosts[1:] else RolloutServer(hosts[0], config.execution, warn)


@pytest.mark.parametrize("num_servers", [1, 2])
def test_each_round_asks_an_adapter_of_its_own_and_none_is_left(
    served: Served, artifacts: dict[str, Path], tmp_path: Path, num_servers: int
) -> None:
    """Servers load each version under a new name, and lose those of a killed attempt, but none of other stages."""
    with running() as other:
        names = {"other_urls": [f"{other.url}/v1"]} if num_servers == 2 else {}
        config, warned = adapted(served.url, **names), []
        every = (served, other)[:num_servers]
        for one in every:
            one.lora, one.adapters = ROOM, {"policy-0123456789ab-killed-step-4": "", "policy-another-run-step-4": ""}
        servers = servers_of(config, artifacts, warned.append)
        asked = [(number, {"prompt": [1]}) for number in range(4)]
        for step in ("step-1", "step-2"):
            servers.take(write_adapter(tmp_path, step, "q_proj", "v_proj"))
            servers.ask(asked, lambda *_: None)
            for one in every:
                assert [*one.adapters.values()] == ["", step]
                assert one.loaded == [], "it keeps its base"
        assert not (tmp_path / "step-1").exists()
        served.num_failing = {"completions": 1, "health": 1}
        servers.ask(asked, lambda *_: None)
        assert warned and [*served.adapters.values()] == ["", "step-2"], "given again, where it was still loaded"
        servers.close()
        for host in ExternalServer.all_of(config, ModelFacts(artifacts["base"] / "model"), "0123456789abcdef"):
            host.forget()
        assert all([*one.adapters] == ["policy-another-run-step-4"] for one in every)


def test_weights_that_it_refuses_twice_are_an_error(
    served: Served, rollouts: tuple[RolloutServer, list[str]], tmp_path: Path
) -> None:
    server, warned = rollouts
    server.take(weights(tmp_path, "first"))
    (tmp_path / "empty").mkdir()
    with pytest.raises(ServerError, match="Cannot find any model weights"):
        server.take(tmp_path / "empty")
    assert len(warned) == 1


def test_what_does_not_go_together_is_refused() -> None:
    server = {"url": "http://host:8000/v1", "served_model": MODEL}
    with pytest.raises(ValidationError, match="should match pattern"):
        config_of("http://key@host")
    with pytest.raises(ValidationError, match="names http://host/v1 twice"):
        config_of("http://host", other_urls=["http://host/v1/"])
    across = {"layout": {"dp_shard": 2}, "execution": {"nodes": 2}}
    make_config("grpo", data={"dataset": "problems"}, grpo={**OPTIONS, "server": server}, **across)


def test_the_stage_has_no_devices_engine_or_options_for_it() -> None:
    config = config_of("http://host")
    assert config.devices == 1
    assert config.resolve_outside() == {}
    idle = dict(config.idle_fields())
    assert "was started by others" in idle["grpo.serving.tensor_parallel_size"]
    assert not {"grpo.serving.dtype", "grpo.serving.max_model_len", "execution.rollout_timeout_s"} & idle.keys()
    alone = make_config("grpo", data={"dataset": "problems"}, grpo=OPTIONS)
    assert "server" not in alone.identity()["grpo"], "or versions would change"


@pytest.mark.parametrize("method", ["grpo", "distill"])
def test_a_server_that_takes_no_pictures_is_refused_where_rows_have_some(served: Served, method: str) -> None:
    config = config_of(served.url, method)
    check_media(config, {"image"})
    served.takes_pictures = False
    check_media(config, set())
    with pytest.raises(ServerError, match="answers 403 to prompts with pictures; start it with `--enable-scale-out`"):
        check_media(config, {"image"})
