"""A new serving engine needs a module and a line in the registry; then serve stages can run it."""

import json
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from stages.core.contract import StageContext
from stages.core.errors import ServerError, TransientError
from stages.kinds.serve.config import ServeConfig
from stages.kinds.serve.run import run
from stages.serving.client import Client
from stages.serving.engine import LAUNCH_FILE, LaunchSpec
from tests.hub_repository import model_files
from tests.tiny_engine import TinyEngine

KEY = "sk-of-the-test"


@pytest.fixture(autouse=True)
def process(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Restore the signal handler and the environment variables that a serve stage changes."""
    monkeypatch.setenv("VLLM_API_KEY", KEY)
    handler = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, handler)


@pytest.fixture
def context(tmp_path: Path) -> StageContext:
    for name, content in model_files(1000).items():
        path = tmp_path / "sft" / "model" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    (tmp_path / "work").mkdir()
    return StageContext(tmp_path / "work", "chat", "0" * 12, {"sft": tmp_path / "sft"}, {}, tmp_path / "cache")


@pytest.fixture
def serve() -> Callable[..., ServeConfig]:
    return lambda **fields: ServeConfig.model_validate({"kind": "serve", "model": "sft", **fields})


def test_its_version_is_part_of_the_stages(tiny_engine: TinyEngine, serve) -> None:
    assert serve().resolve_outside() == {"tiny_version": "1.2"}


def test_it_is_started_checked_measured_leased_and_ended(tiny_engine: TinyEngine, serve, context) -> None:
    stage = run(serve(benchmark={"concurrencies": [1, 2]}), context)
    result = next(stage)

    client = Client(result.lease.url, KEY, "sft")
    assert client.complete("What is 20 + 22?").text == "42"
    assert result.tags == {"tiny_version": "1.2"}
    assert {"time_to_ready_s", "ttft_ms_concurrency_1", "output_tokens_per_s_concurrency_2"} <= result.metrics.keys()
    spec = LaunchSpec.model_validate_json((context.work / LAUNCH_FILE).read_text())
    assert (spec.engine, spec.engine_version) == ("tiny", "1.2")
    assert "checking its answers" in (context.work / "events.jsonl").read_text()
    stage.close()
    with pytest.raises(TransientError):
        client.models()


def test_what_it_is_at_is_told_without_an_end_that_nobody_knows(tiny_engine: TinyEngine, serve, context) -> None:
    stage = run(serve(benchmark={"concurrencies": [1]}), context)
    next(stage)
    stage.close()

    events = [json.loads(line) for line in (context.work / "events.jsonl").read_text().splitlines()]
    progress = [event for event in events if event["event"] == "progress"]
    assert progress[-1]["message"] == "measuring under 1 requests at a time"
    assert not any("total" in event for event in progress)


@pytest.mark.parametrize(("asked", "given"), [(8, 7), (1, 1)])
def test_a_time_between_tokens_that_were_not_there_is_not_measured(
    tiny_engine: TinyEngine, serve, context, asked, given
) -> None:
    tiny_engine.answer_tokens = given
    stage = run(serve(benchmark={"concurrencies": [2], "output_tokens": asked}), context)
    metrics = next(stage).metrics
    stage.close()

    assert "inter_token_latency_ms_concurrency_2" not in metrics
    assert {"ttft_ms_concurrency_2", "output_tokens_per_s_concurrency_2"} <= metrics.keys()
    assert "latency under 2 at a time: not measured" in (context.work / "events.jsonl").read_text()


@pytest.mark.parametrize("accepted", [None, 0.75])
def test_the_share_of_accepted_guesses_is_a_metric_where_tokens_are_guessed(
    tiny_engine: TinyEngine, serve, context, accepted
) -> None:
    tiny_engine.accepted_fraction = accepted
    stage = run(serve(benchmark={"concurrencies": [2]}), context)
    metrics = next(stage).metrics
    stage.close()

    assert metrics.get("accepted_fraction_concurrency_2") == accepted
    assert "accepted_fraction" in ServeConfig.REPORTED.under_load


def test_why_it_died_of_its_first_request_is_found_in_its_log(tiny_engine: TinyEngine, serve, context) -> None:
    (context.inputs["sft"] / "model" / "deadly").touch()

    with pytest.raises(ServerError, match=r"failed at its first request .*: tiny: cannot run the model: it has a file"):
        next(run(serve(), context))


def test_why_it_did_not_start_is_found_in_its_log(tiny_engine: TinyEngine, serve, context) -> None:
    (context.inputs["sft"] / "model" / "broken").touch()

    with pytest.raises(ServerError, match=r"the Tiny server for sft .*: tiny: cannot load the model: it has a file"):
        next(run(serve(), context))
