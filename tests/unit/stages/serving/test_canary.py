"""Two model versions behind one proxy: routing, counts, and no lost request when one of them stops."""

import json
import math
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from stages.serving.backend import Backend, Canary, EngineAddress, Naming
from stages.serving.proxy import Proxy, listening
from stages.serving.samples import Samples
from stages.serving.server import listening_socket
from stages.serving.tally import ServedVersion
from tests.openai_engine import PARTS, PROMPT_TOKENS, OpenAIEngine

KEY = "key"
CHAT = "/v1/chat/completions"
SHARE = 0.2
NUM_SESSIONS = 200
PATIENCE_S = 60.0


@dataclass
class Both:
    """Champion (version 1) and challenger (version 2) behind one proxy, with an HTTP client."""

    champion: OpenAIEngine
    challenger: OpenAIEngine
    backend: Backend
    canary: Canary
    proxy: Proxy
    client: httpx.Client

    def chat(self, session: str = "", **body) -> httpx.Response:
        headers = {"X-Session-Id": session} if session else {}
        question = {"model": "adder", "messages": [{"role": "user", "content": "who?"}], **body}
        return self.client.post(CHAT, json=question, headers=headers)

    def session_of(self, version: str) -> str:
        """Return a session id whose requests the proxy routes to the given model version."""
        wanted = version == "2"
        return next(f"s{n}" for n in range(1000) if self.canary.takes(f"session s{n}") == wanted)

    def counted(self, version: str) -> dict:
        counted = self.client.get("/versions").json()["versions"]
        return next(one for one in counted if one["version"] == version)


@pytest.fixture
def both() -> Iterator[Both]:
    with in_front() as found:
        yield found


@contextmanager
def in_front(**options) -> Iterator[Both]:
    champion, challenger = OpenAIEngine("champion"), OpenAIEngine("challenger")
    with ExitStack() as stack:
        addresses = [stack.enter_context(engine.listening()) for engine in (champion, challenger)]
        backends = [
            Backend(address, version=ServedVersion("adder", str(number))) for number, address in enumerate(addresses, 1)
        ]
        proxy, canary = Proxy(backends[0], KEY, **options), Canary(backends[1], SHARE)
        proxy.set_canary(canary)
        public = stack.enter_context(listening_socket("127.0.0.1", None))
        stack.enter_context(listening(proxy, public))
        url = f"http://127.0.0.1:{public.getsockname()[1]}"
        headers = {"Authorization": f"Bearer {KEY}"}
        client = stack.enter_context(httpx.Client(base_url=url, headers=headers, timeout=PATIENCE_S))
        yield Both(champion, challenger, backends[0], canary, proxy, client)


def version_of(answer: httpx.Response) -> str:
    """Return the model version that answered; the answer's header and content must agree on it."""
    version = answer.headers["x-lifecycle-version"]
    name = answer.json()["choices"][0]["message"]["content"]
    assert (version, name) in {("1", "champion"), ("2", "challenger")}
    return version


def test_a_share_of_the_sessions_goes_to_the_challenger_and_each_stays_where_it_is(both):
    sessions = [f"session-{number}" for number in range(NUM_SESSIONS)]
    with ThreadPoolExecutor(8) as pool:
        first, second = (list(pool.map(lambda one: version_of(both.chat(one)), sessions)) for _ in range(2))
    assert first == second
    sigma = math.sqrt(NUM_SESSIONS * SHARE * (1 - SHARE))
    assert abs(first.count("2") - NUM_SESSIONS * SHARE) < 3 * sigma  # a hash decides: no run differs from another
    assert both.counted("1")["requests"] == 2 * first.count("1")
    assert both.counted("2")["requests"] == 2 * first.count("2")


def test_another_challenger_gets_other_sessions(both):
    def taken(version: str) -> set[int]:
        canary = Canary(Backend(EngineAddress(port=9), version=ServedVersion("adder", version)), SHARE)
        return {number for number in range(NUM_SESSIONS) if canary.takes(f"session {number}")}

    assert len(taken("2") & taken("3")) < NUM_SESSIONS * SHARE / 2  # of those of one, a fifth would be expected


def test_without_a_session_a_user_is_the_key_and_without_a_user_the_address(both):
    by_user = {version_of(both.chat(user=f"u{number}")) for number in range(50)}
    assert by_user == {"1", "2"}
    for number in range(20):
        assert version_of(both.chat(user=f"u{number}")) == version_of(both.chat(user=f"u{number}"))
        session = both.session_of("2")
        assert version_of(both.chat(session, user=f"u{number}")) == "2"
    assert len({version_of(both.chat()) for _ in range(20)}) == 1


def test_a_challenger_that_is_asked_no_more_answers_what_it_has(both):
    session = both.session_of("2")
    both.challenger.go_on.clear()
    body = {"messages": [], "stream": True}
    with both.client.stream("POST", CHAT, json=body, headers={"X-Session-Id": session}) as answer:
        lines = answer.iter_lines()
        assert "it " in next(lines)
        both.proxy.set_canary(None)
        assert version_of(both.chat(session)) == "1"
        assert not both.canary.backend.idle.is_set()
        both.challenger.go_on.set()
        assert "data: [DONE]" in [*lines]
    assert both.canary.backend.idle.wait(PATIENCE_S)


def test_a_challenger_that_becomes_champion_gets_all_requests(both):
    before = both.proxy.switch(both.canary.backend)
    assert before is both.backend
    assert {version_of(both.chat(f"s{number}")) for number in range(20)} == {"2"}
    assert both.client.get("/versions").json()["challenger"] is None


@pytest.mark.parametrize("trouble", ["is away", "answers with an error"])
def test_what_a_challenger_fails_to_answer_the_champion_does(both, trouble):
    if trouble == "is away":
        unreachable = Backend(EngineAddress(port=9), version=both.canary.backend.version)
        both.proxy.set_canary(Canary(unreachable, SHARE))
    else:
        both.challenger.status = 500
    session = both.session_of("2")
    assert [version_of(both.chat(session)) for _ in range(3)] == ["1", "1", "1"]
    found = {version: both.counted(version) for version in ("1", "2")}
    assert {version: (one["requests"], one["errors"]) for version, one in found.items()} == {"1": (3, 0), "2": (3, 3)}


def test_an_answer_that_a_challenger_breaks_off_is_broken_off_and_counted_as_an_error(both):
    both.challenger.breaks_off = True
    with pytest.raises(httpx.TransportError):
        both.chat(both.session_of("2"), stream=True)
    assert both.counted("2")["errors"] == 1


def test_errors_of_the_champion_are_those_of_its_requests(both):
    both.champion.status = 503
    assert both.chat(both.session_of("1")).status_code == 503
    assert both.counted("1")["errors"] == 1


def test_a_client_that_goes_away_is_no_error_of_the_version(both):
    both.champion.go_on.clear()
    headers = {"X-Session-Id": both.session_of("1")}
    with both.client.stream("POST", CHAT, json={"stream": True}, headers=headers) as answer:
        assert "it " in next(answer.iter_lines())
    assert both.backend.idle.wait(PATIENCE_S)
    assert (both.counted("1")["errors"], both.counted("1")["latency_p50_s"]) == (0, None)
    assert 'route="/v1/chat/completions",status="499"} 1.0' in both.client.get("/metrics").text


def events(answer: httpx.Response) -> list[dict]:
    lines = [line.removeprefix("data: ") for line in answer.iter_lines() if line]
    assert lines.pop() == "[DONE]"
    return [json.loads(line) for line in lines]


def test_tokens_of_a_stream_are_counted_and_shown_to_those_who_ask(both):
    session = both.session_of("1")
    received = events(both.chat(session, stream=True))
    assert [one["choices"][0]["delta"]["content"] for one in received] == list(PARTS)
    assert both.champion.asked[-1]["stream_options"] == {"include_usage": True}
    received = events(both.chat(session, stream=True, stream_options={"include_usage": True}))
    assert received[-1]["usage"] == {"prompt_tokens": PROMPT_TOKENS, "completion_tokens": len(PARTS)}
    counted = both.counted("1")
    assert counted["prompt_tokens"] == 2 * PROMPT_TOKENS
    assert counted["completion_tokens"] == 2 * len(PARTS)
    assert counted["finish_reasons"] == {"stop": 2}
    assert 0 < counted["latency_p50_s"] <= counted["latency_p95_s"] < PATIENCE_S


def test_conversations_are_sampled_as_they_pass(tmp_path):
    with Samples(tmp_path, 1.0, 2**20) as samples, in_front(sampler=samples) as both:
        sessions = [both.session_of("1"), both.session_of("2")]
        both.chat(sessions[0], user="jo")
        both.chat(sessions[1], stream=True)
        both.client.post("/v1/completions", json={"prompt": "who?"})
        assert both.backend.idle.wait(PATIENCE_S)
        assert both.canary.backend.idle.wait(PATIENCE_S)
    written = "".join(file.read_text() for file in tmp_path.glob("requests-*.jsonl"))
    answers = [(row["version"], row["messages"][-1]["content"]) for row in map(json.loads, written.splitlines())]
    assert answers == [("1", "champion"), ("2", "".join(PARTS))]
    assert not [word for word in (KEY, "jo", *sessions) if f'"{word}"' in written]


def test_every_line_of_the_metrics_has_its_version(both):
    both.champion.status = 400
    for version in ("1", "2", "2"):
        both.chat(both.session_of(version))
    answer = both.client.get("/metrics", headers={"Accept": "application/openmetrics-text"})
    assert answer.headers["content-type"].startswith("text/plain; version=0.0.4")
    assert both.champion.accepted == ["text/plain; version=0.0.4"]
    declared = Counter(line.split()[2] for line in answer.text.splitlines() if line.startswith("# TYPE "))
    assert set(declared.values()) == {1}
    samples = [one for family in text_string_to_metric_families(answer.text) for one in family.samples]
    assert all(one.labels["lifecycle_model"] == "adder" for one in samples)
    assert {one.labels["lifecycle_version"] for one in samples} == {"1", "2"}

    def values(name: str, **labels: str) -> dict[str, float]:
        """Return the values of a Prometheus metric with these labels, by model version."""
        fitting = [one for one in samples if one.name == name and labels.items() <= one.labels.items()]
        return {one.labels["lifecycle_version"]: one.value for one in fitting}

    assert values("engine:requests_total", model_name='a "quoted" {name}', engine="0") == {"1": 7.0, "2": 7.0}
    assert len([one for one in samples if one.name == "engine:requests_total"]) == 4
    assert values("engine:waiting") == {"1": 2.0, "2": 2.0}
    assert values("engine:latency_seconds_bucket", le="+Inf") == {"1": 4.0, "2": 4.0}
    assert values("lifecycle_engine_up") == {"1": 1.0, "2": 1.0}
    assert values("lifecycle_requests_total", route=CHAT, status="400") == {"1": 1.0}
    assert values("lifecycle_requests_total", route=CHAT, status="200") == {"2": 2.0}
    assert values("lifecycle_prompt_tokens_total") == {"1": 0.0, "2": 2.0 * PROMPT_TOKENS}
    assert values("lifecycle_finish_reasons_total", finish_reason="stop") == {"2": 2.0}
    assert values("lifecycle_request_duration_seconds_count") == {"1": 0.0, "2": 2.0}
    assert values("lifecycle_request_duration_seconds_bucket", le="+Inf") == {"1": 0.0, "2": 2.0}


def test_the_metrics_of_a_version_that_is_away_are_that_it_is(both):
    unreachable = Backend(EngineAddress(port=9), version=both.canary.backend.version)
    both.proxy.set_canary(Canary(unreachable, SHARE))
    metrics = both.client.get("/metrics").text
    assert 'lifecycle_engine_up{lifecycle_model="adder",lifecycle_version="2"} 0' in metrics
    assert 'lifecycle_engine_up{lifecycle_model="adder",lifecycle_version="1"} 1' in metrics


def test_two_adapters_of_one_engine_are_asked_by_one_name_and_share_its_metrics(both):
    first, second = (
        Backend(both.backend.address, Naming("adder", f"adder@{version.version}"), version)
        for version in (both.backend.version, both.canary.backend.version)
    )
    both.proxy.switch(first)
    both.proxy.set_canary(Canary(second, SHARE))
    for version in ("1", "2"):
        assert both.chat(both.session_of(version)).headers["x-lifecycle-version"] == version
    assert [asked["model"] for asked in both.champion.asked] == ["adder@1", "adder@2"]
    assert both.chat(both.session_of("2"), model="adder@2").status_code == 404
    families = text_string_to_metric_families(both.client.get("/metrics").text)
    waiting = next(family for family in families if family.name == "engine:waiting")
    assert [(one.labels["lifecycle_version"], one.value) for one in waiting.samples] == [("1,2", 2.0)]
